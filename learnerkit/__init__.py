"""learnerkit: a small training library on PyTorch, right by default on any number of processes.

Public names are resolved on first use (PEP 562), so that `python -m learnerkit.launch` starts without importing torch.
They stand here twice, for Python and for type checkers, and a test compares them: a stub file would need a dependency.
"""

import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, NoReturn

__version__ = "0.2.0"

if TYPE_CHECKING:  # editors and type checkers do not follow __getattr__
    from learnerkit import datasets as datasets
    from learnerkit import distributed as distributed
    from learnerkit import distributed as world  # noqa: F401  # `world` is its other name
    from learnerkit import sweep as sweep
    from learnerkit.callback import Callback as Callback
    from learnerkit.callbacks.accumulation import GradientAccumulation as GradientAccumulation
    from learnerkit.callbacks.augmentation import BatchTransform as BatchTransform
    from learnerkit.callbacks.augmentation import CutMix as CutMix
    from learnerkit.callbacks.augmentation import MixUp as MixUp
    from learnerkit.callbacks.averaging import EMA as EMA
    from learnerkit.callbacks.averaging import SWA as SWA
    from learnerkit.callbacks.carried import CarriedState as CarriedState
    from learnerkit.callbacks.debugging import OverfitBatch as OverfitBatch
    from learnerkit.callbacks.debugging import Profiler as Profiler
    from learnerkit.callbacks.debugging import ShortEpochCallback as ShortEpochCallback
    from learnerkit.callbacks.precision import ChannelsLast as ChannelsLast
    from learnerkit.callbacks.precision import Compile as Compile
    from learnerkit.callbacks.precision import GradientClip as GradientClip
    from learnerkit.callbacks.precision import MixedPrecision as MixedPrecision
    from learnerkit.callbacks.progress import ProgressCallback as ProgressCallback
    from learnerkit.callbacks.progress import ShowGraphCallback as ShowGraphCallback
    from learnerkit.callbacks.recomputing import ActivationCheckpointing as ActivationCheckpointing
    from learnerkit.callbacks.recorder import Recorder as Recorder
    from learnerkit.callbacks.schedule import ParamScheduler as ParamScheduler
    from learnerkit.callbacks.schedule import TorchScheduler as TorchScheduler
    from learnerkit.callbacks.schedule import linear_warmup as linear_warmup
    from learnerkit.callbacks.splitting import SplitBatch as SplitBatch
    from learnerkit.callbacks.tracking import EarlyStoppingCallback as EarlyStoppingCallback
    from learnerkit.callbacks.tracking import ReduceLROnPlateau as ReduceLROnPlateau
    from learnerkit.callbacks.tracking import SaveModelCallback as SaveModelCallback
    from learnerkit.callbacks.tracking import TerminateOnNaNCallback as TerminateOnNaNCallback
    from learnerkit.callbacks.tracking import ValidateEvery as ValidateEvery
    from learnerkit.callbacks.training import MCDropout as MCDropout
    from learnerkit.checkpoints.callback import CheckpointCallback as CheckpointCallback
    from learnerkit.data import DataLoaders as DataLoaders
    from learnerkit.distributed import on_rank0 as on_rank0
    from learnerkit.distributed import rank0_first as rank0_first
    from learnerkit.distributed import set_seed as set_seed
    from learnerkit.events import CancelBackwardException as CancelBackwardException
    from learnerkit.events import CancelBatchException as CancelBatchException
    from learnerkit.events import CancelEpochException as CancelEpochException
    from learnerkit.events import CancelFitException as CancelFitException
    from learnerkit.events import CancelStepException as CancelStepException
    from learnerkit.events import CancelTrainException as CancelTrainException
    from learnerkit.events import CancelValidException as CancelValidException
    from learnerkit.events import Event as Event
    from learnerkit.export.hub import push_to_hub as push_to_hub
    from learnerkit.files import CheckpointError as CheckpointError
    from learnerkit.images.augmentation import ImageAugmentation as ImageAugmentation
    from learnerkit.images.data import ImageData as ImageData
    from learnerkit.inspection.hooks import ActivationStats as ActivationStats
    from learnerkit.inspection.hooks import Hook as Hook
    from learnerkit.inspection.hooks import Hooks as Hooks
    from learnerkit.inspection.interpretation import ClassificationInterpretation as ClassificationInterpretation
    from learnerkit.inspection.layers import layer_decay as layer_decay
    from learnerkit.language.data import TextData as TextData
    from learnerkit.language.models import TextClassifier as TextClassifier
    from learnerkit.language.models import text_learner as text_learner
    from learnerkit.learner import Learner as Learner
    from learnerkit.learner import from_hub as from_hub
    from learnerkit.learner import load_learner as load_learner
    from learnerkit.loggers.tables import CSVLogger as CSVLogger
    from learnerkit.loggers.tables import JSONLogger as JSONLogger
    from learnerkit.loggers.trackers import CometCallback as CometCallback
    from learnerkit.loggers.trackers import MLflowCallback as MLflowCallback
    from learnerkit.loggers.trackers import TensorBoardCallback as TensorBoardCallback
    from learnerkit.loggers.trackers import TrackioCallback as TrackioCallback
    from learnerkit.loggers.trackers import WandbCallback as WandbCallback
    from learnerkit.metrics import AccumMetric as AccumMetric
    from learnerkit.metrics import Dice as Dice
    from learnerkit.metrics import IoU as IoU
    from learnerkit.metrics import Metric as Metric
    from learnerkit.metrics import accuracy as accuracy
    from learnerkit.metrics import accuracy_multi as accuracy_multi
    from learnerkit.metrics import error_rate as error_rate
    from learnerkit.metrics import mae as mae
    from learnerkit.metrics import mse as mse
    from learnerkit.metrics import perplexity as perplexity
    from learnerkit.metrics import rmse as rmse
    from learnerkit.metrics import top_k_accuracy as top_k_accuracy
    from learnerkit.parallel import DataParallelCallback as DataParallelCallback
    from learnerkit.parallel import DistributedCallback as DistributedCallback
    from learnerkit.parallel import ParallelCallback as ParallelCallback
    from learnerkit.scaling.monitor import ScalingMonitor as ScalingMonitor
    from learnerkit.scaling.noise import GradientNoiseScale as GradientNoiseScale
    from learnerkit.scaling.rate import scaled_lr as scaled_lr
    from learnerkit.scaling.report import ScalingReport as ScalingReport
    from learnerkit.tabular.data import TabularData as TabularData
    from learnerkit.tabular.model import TabularModel as TabularModel
    from learnerkit.tabular.model import tabular_learner as tabular_learner
    from learnerkit.vision.classifier import vision_learner as vision_learner
    from learnerkit.vision.unet import unet_learner as unet_learner

_HOMES = {
    "callback": ["Callback"],
    "callbacks.accumulation": ["GradientAccumulation"],
    "callbacks.augmentation": ["BatchTransform", "CutMix", "MixUp"],
    "callbacks.averaging": ["EMA", "SWA"],
    "callbacks.carried": ["CarriedState"],
    "callbacks.debugging": ["OverfitBatch", "Profiler", "ShortEpochCallback"],
    "callbacks.precision": ["ChannelsLast", "Compile", "GradientClip", "MixedPrecision"],
    "callbacks.progress": ["ProgressCallback", "ShowGraphCallback"],
    "callbacks.recorder": ["Recorder"],
    "callbacks.recomputing": ["ActivationCheckpointing"],
    "callbacks.schedule": ["ParamScheduler", "TorchScheduler", "linear_warmup"],
    "callbacks.splitting": ["SplitBatch"],
    "callbacks.tracking": [
        "EarlyStoppingCallback", "ReduceLROnPlateau", "SaveModelCallback", "TerminateOnNaNCallback", "ValidateEvery",
    ],
    "callbacks.training": ["MCDropout"],
    "checkpoints.callback": ["CheckpointCallback"],
    "data": ["DataLoaders"],
    "events": [
        "CancelBackwardException", "CancelBatchException", "CancelEpochException", "CancelFitException",
        "CancelStepException", "CancelTrainException", "CancelValidException", "Event",
    ],
    "export.hub": ["push_to_hub"],
    "files": ["CheckpointError"],
    "images.augmentation": ["ImageAugmentation"],
    "images.data": ["ImageData"],
    "inspection.hooks": ["ActivationStats", "Hook", "Hooks"],
    "inspection.interpretation": ["ClassificationInterpretation"],
    "inspection.layers": ["layer_decay"],
    "loggers.tables": ["CSVLogger", "JSONLogger"],
    "loggers.trackers": ["CometCallback", "MLflowCallback", "TensorBoardCallback", "TrackioCallback", "WandbCallback"],
    "language.data": ["TextData"],
    "language.models": ["TextClassifier", "text_learner"],
    "learner": ["Learner", "from_hub", "load_learner"],
    "metrics": [
        "AccumMetric", "Dice", "IoU", "Metric", "accuracy", "accuracy_multi", "error_rate", "mae", "mse", "perplexity",
        "rmse", "top_k_accuracy",
    ],
    "parallel": ["DataParallelCallback", "DistributedCallback", "ParallelCallback"],
    "scaling.rate": ["scaled_lr"],
    "scaling.noise": ["GradientNoiseScale"],
    "scaling.monitor": ["ScalingMonitor"],
    "scaling.report": ["ScalingReport"],
    "tabular.data": ["TabularData"],
    "tabular.model": ["TabularModel", "tabular_learner"],
    "vision.classifier": ["vision_learner"],
    "vision.unet": ["unet_learner"],
    "distributed": ["on_rank0", "rank0_first", "set_seed"],
}  # fmt: skip

_home_of = {name: home for home, names in _HOMES.items() for name in names}

_MODULES = ("datasets", "distributed", "sweep", "world")

_UNLISTED = {  # found as the others are, and seldom written: what functions make, and second names
    "Hook", "Hooks", "ParallelCallback", "ScalingReport", "TabularModel", "TextClassifier", "world",
}  # fmt: skip

__all__ = sorted({*_home_of, *_MODULES} - _UNLISTED)

_OLD = {  # names before 0.2.0, which work with a warning until 0.3.0, and where each is now
    "BnFreeze": "callbacks.training.BnFreeze", "DriftCheck": "parallel.DriftCheck",
    "ProfilerCallback": "Profiler",
    "SchedCos": "callbacks.schedule.SchedCos", "SchedExp": "callbacks.schedule.SchedExp",
    "SchedLin": "callbacks.schedule.SchedLin", "SchedNo": "callbacks.schedule.SchedNo",
    "SchedPoly": "callbacks.schedule.SchedPoly", "SuggestionMethod": "callbacks.lr_find.SuggestionMethod",
    "TrackerCallback": "callbacks.tracking.TrackerCallback",
    "TrainEvalCallback": "callbacks.training.TrainEvalCallback",
    "combine_scheds": "callbacks.schedule.combine_scheds", "combined_cos": "callbacks.schedule.combined_cos",
    "minimum": "callbacks.lr_find.minimum", "slide": "callbacks.lr_find.slide", "steep": "callbacks.lr_find.steep",
    "unwrap": "utils.unwrap", "valley": "callbacks.lr_find.valley",
}  # fmt: skip


_ELSEWHERE = {  # names of other libraries, with the names that serve the same purpose here
    "Trainer": "Learner", "LightningModule": "Learner", "LightningDataModule": "DataLoaders", "Accelerator": "Learner",
    "cnn_learner": "vision_learner", "text_classifier_learner": "text_learner", "DataBlock": "DataLoaders",
    "ImageDataLoaders": "ImageData", "TextDataLoaders": "TextData", "TabularDataLoaders": "TabularData",
    "TabularPandas": "TabularData", "AvgMetric": "Metric", "ModelCheckpoint": "CheckpointCallback",
    "push_to_hub_fastai": "push_to_hub", "from_pretrained_fastai": "from_hub",
    "EarlyStopping": "EarlyStoppingCallback", "LearningRateFinder": "Learner.lr_find", "seed_everything": "set_seed",
    "rank_zero_only": "on_rank0", "GradientAccumulationScheduler": "GradientAccumulation",
    "StochasticWeightAveraging": "SWA", "Interpretation": "ClassificationInterpretation",
    "skm_to_fastai": "AccumMetric", "MCDropoutCallback": "MCDropout", "find_executable_batch_size": "SplitBatch",
    "BatchSizeFinder": "Learner.find_batch_size",
}  # fmt: skip


def __getattr__(name: str) -> object:
    if name in _MODULES:
        return import_module(f"learnerkit.{name}")
    if name in _OLD:
        place = f"learnerkit.{_OLD[name]}"
        warnings.warn(
            f"learnerkit.{name} is {place} since 0.2.0; the old name goes in 0.3.0", FutureWarning, stacklevel=2
        )
        home, _, now = place.rpartition(".")
        return getattr(import_module(home), now)
    if name not in _home_of:
        _refuse(name)
    found = getattr(import_module(f"learnerkit.{_home_of[name]}"), name)
    globals()[name] = found  # the next look-up does not call this function
    return found


def _refuse(name: str) -> NoReturn:
    """Raise the error for an unknown name, with the name that may have been meant."""
    from inspect import currentframe

    from learnerkit.text import did_you_mean

    near = "" if name.startswith("_") else did_you_mean(name, [*_home_of, *_MODULES])
    near = f"; here it is {_ELSEWHERE[name]}" if name in _ELSEWHERE else near
    asked = currentframe().f_back.f_back.f_globals["__name__"]  # type: ignore[union-attr]  # there is always a caller
    if near and asked == "importlib._bootstrap" and find_spec(f"learnerkit.{name}") is None:
        # `from learnerkit import name`, where Python would replace the text of an AttributeError.
        raise ImportError(f"cannot import name {name!r} from 'learnerkit'{near}", name=name)
    raise AttributeError(f"module 'learnerkit' has no attribute {name!r}{near}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
