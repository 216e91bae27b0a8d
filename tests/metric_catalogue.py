"""The metrics of torchmetrics and torcheval: how to make each, and data for it."""
# ruff: noqa: SIM905 (many names in a row read best as one text)

import importlib
import inspect
from functools import partial

import torch
from torch import nn

SIZES = (4, 3, 5, 2)  # of the batches

# Data: batches of predictions and targets


def seeded(make):
    def batches(*args, **kwargs):
        generator = torch.Generator().manual_seed(1)
        rand = partial(torch.rand, generator=generator, dtype=torch.float64)
        randint = partial(torch.randint, generator=generator)
        return [make(n, rand, randint, *args, **kwargs) for n in SIZES]

    return batches


@seeded
def values(n, rand, randint):
    return (rand(n),)


@seeded
def binary(n, rand, randint):
    return rand(n), randint(2, (n,))


@seeded
def binary_groups(n, rand, randint):
    return rand(n), randint(2, (n,)), randint(2, (n,))


@seeded
def classes(n, rand, randint, extra=()):
    return rand(n, 3, *extra).softmax(1), randint(3, (n, *extra))


@seeded
def labels(n, rand, randint, extra=()):
    return rand(n, 3, *extra), randint(2, (n, 3, *extra))


@seeded
def numbers(n, rand, randint, extra=()):
    return rand(n, *extra) + 0.1, rand(n, *extra) + 0.1


@seeded
def distributions(n, rand, randint):
    return rand(n, 4).softmax(1), rand(n, 4).softmax(1)


@seeded
def ensembles(n, rand, randint):
    return rand(n, 5), rand(n)


@seeded
def queries(n, rand, randint):
    return rand(n), randint(2, (n,)), randint(3, (n,))


@seeded
def clusters(n, rand, randint):
    return randint(3, (n,)), randint(3, (n,))


@seeded
def points(n, rand, randint):
    return rand(n, 2), torch.arange(n) % 2


@seeded
def ratings(n, rand, randint):
    counts = randint(3, (n, 3))
    counts[:, 2] = 6 - counts[:, 0] - counts[:, 1]
    return (counts,)


@seeded
def waves(n, rand, randint, extra=()):
    return rand(n, *extra, 200) - 0.5, rand(n, *extra, 200) - 0.5


@seeded
def spectra(n, rand, randint):
    return rand(n, 20, 10, 2), rand(n, 20, 10, 2)


@seeded
def images(n, rand, randint, size=32, channels=3):
    return rand(n, channels, size, size).float(), rand(n, channels, size, size).float()


@seeded
def images_alone(n, rand, randint):
    return (rand(n, 3, 16, 16).float(),)


@seeded
def real_or_not(n, rand, randint):
    return rand(n, 3, 8, 8).float(), n % 2 == 0


@seeded
def sharpening(n, rand, randint):
    return rand(n, 3, 32, 32), {"ms": rand(n, 3, 16, 16), "pan": rand(n, 3, 32, 32)}


@seeded
def segments(n, rand, randint):
    return randint(2, (n, 3, 8, 8)), randint(2, (n, 3, 8, 8))


@seeded
def panoptic(n, rand, randint):
    return randint(2, (n, 6, 6, 2)), randint(2, (n, 6, 6, 2))


@seeded
def boxes(n, rand, randint):
    def sample(scored):
        k = int(randint(1, 4, (1,)))
        corner = rand(k, 2) * 20
        found = {"boxes": torch.cat([corner, corner + 5 + rand(k, 2) * 10], 1).float(), "labels": randint(2, (k,))}
        return found | ({"scores": rand(k).float()} if scored else {})

    truth = [sample(False) for _ in range(n)]
    near = [{**t, "boxes": t["boxes"] + rand(1).float(), "scores": rand(len(t["labels"])).float()} for t in truth]
    return near, truth


@seeded
def shapes(n, rand, randint):
    return rand(n, 6, 2), rand(n, 6, 2)


@seeded
def vertices(n, rand, randint):
    return rand(n, 7, 3).float(), rand(n, 7, 3).float()


WORDS = "the cat sat on a mat and dog ran home".split()


def sentence(randint):
    return " ".join(WORDS[int(i)] for i in randint(10, (6,)))


@seeded
def sentences(n, rand, randint):
    return [sentence(randint) for _ in range(n)], [sentence(randint) for _ in range(n)]


@seeded
def translations(n, rand, randint):
    return [sentence(randint) for _ in range(n)], [[sentence(randint)] for _ in range(n)]


@seeded
def answers(n, rand, randint):
    ids = [str(int(i)) for i in randint(10**9, (n,))]
    return (
        [{"prediction_text": sentence(randint), "id": i} for i in ids],
        [{"answers": {"answer_start": [1], "text": [sentence(randint)]}, "id": i} for i in ids],
    )


@seeded
def tokens(n, rand, randint):
    return rand(n, 5, 7), randint(7, (n, 5))


@seeded
def tasks(n, rand, randint):
    return {"a": rand(n), "b": rand(n)}, {"a": randint(2, (n,)), "b": rand(n)}


# torchmetrics: class -> one (arguments, data) or several

SAME = object()  # the arguments that stand for the name of the class

_BINARY_CURVES = "AUROC AveragePrecision EER LogAUC PrecisionRecallCurve ROC"
_AT = {"PrecisionAtFixedRecall": "min_recall", "RecallAtFixedPrecision": "min_precision"} | {
    "SensitivityAtSpecificity": "min_specificity",
    "SpecificityAtSensitivity": "min_sensitivity",
}
_COUNTS = (
    "Accuracy F1Score HammingDistance JaccardIndex MatthewsCorrCoef NegativePredictiveValue Precision Recall "
    "Specificity StatScores ConfusionMatrix"
)
_FACADES = (
    "AUROC EER ROC Accuracy AveragePrecision CalibrationError CohenKappa ConfusionMatrix F1Score HammingDistance "
    "HingeLoss JaccardIndex LogAUC MatthewsCorrCoef NegativePredictiveValue Precision PrecisionRecallCurve Recall "
    "Specificity StatScores"
)


def _add(table: dict, names: str, data, *args, **kwargs) -> None:
    for name in names.split():
        table.setdefault(name, []).append((args, kwargs, data))


def torchmetrics_table() -> dict:
    """Of each class by name: a list of (how to make it, its data)."""
    table: dict = {}
    add = partial(_add, table)
    three, label = {"num_classes": 3}, {"num_labels": 3}
    for curve in _BINARY_CURVES.split():
        for thresholds in (None, 5):
            add(f"Binary{curve}", binary, thresholds=thresholds)
            add(f"Multiclass{curve}", classes, thresholds=thresholds, **three)
            add(f"Multilabel{curve}", labels, thresholds=thresholds, **label)
    add("BinaryAUROC", binary, max_fpr=0.5)
    add("BinaryAUROC", binary, ignore_index=1)
    for name, limit in _AT.items():
        add(f"Binary{name}", binary, **{limit: 0.5})
        add(f"Multiclass{name}", classes, **{limit: 0.5}, **three)
        add(f"Multilabel{name}", labels, **{limit: 0.5}, **label)
        add(name, binary, task="binary", **{limit: 0.5})
    for count in _COUNTS.split():
        add(f"Binary{count}", binary)
        add(f"Multiclass{count}", classes, **three)
        add(f"Multilabel{count}", labels, **label)
    for count in ("Accuracy", "F1Score", "StatScores"):
        for average in ("micro", "weighted", None):
            add(f"Multiclass{count}", classes, average=average, **three)
        add(f"Binary{count}", partial(labels, (2,)), multidim_average="samplewise")
        add(f"Multiclass{count}", partial(classes, (2,)), multidim_average="samplewise", **three)
        add(f"Multilabel{count}", partial(labels, (2,)), multidim_average="samplewise", **label)
    add("BinaryFBetaScore", binary, beta=2.0)
    add("MulticlassFBetaScore", classes, beta=2.0, **three)
    add("MultilabelFBetaScore", labels, beta=2.0, **label)
    add("FBetaScore", binary, task="binary", beta=2.0)
    add("BinaryCalibrationError BinaryCohenKappa BinaryHingeLoss", binary)
    add("MulticlassCalibrationError MulticlassCohenKappa MulticlassHingeLoss", classes, **three)
    add("MulticlassExactMatch", partial(classes, (2,)), **three)
    add("MultilabelExactMatch MultilabelCoverageError", labels, **label)
    add("MultilabelRankingAveragePrecision MultilabelRankingLoss", labels, **label)
    add("ExactMatch", partial(classes, (2,)), task="multiclass", **three)
    add("BinaryFairness BinaryGroupStatRates", binary_groups, num_groups=2)
    add(_FACADES, classes, task="multiclass", **three)

    add("CatMetric MaxMetric MeanMetric MinMetric SumMetric RunningMean RunningSum", values)
    add("RunningMean", values, window=2)

    add("ScaleInvariantSignalDistortionRatio ScaleInvariantSignalNoiseRatio SignalNoiseRatio", waves)
    add("SourceAggregatedSignalDistortionRatio", partial(waves, (2,)))
    add("SignalDistortionRatio", waves, filter_length=16)
    add("ComplexScaleInvariantSignalNoiseRatio", spectra)

    def pit():
        from torchmetrics.functional.audio import scale_invariant_signal_noise_ratio as ratio

        return ratio

    add("PermutationInvariantTraining", partial(waves, (2,)), pit)

    add("AdjustedMutualInfoScore AdjustedRandScore CompletenessScore FowlkesMallowsIndex HomogeneityScore", clusters)
    add("MutualInfoScore NormalizedMutualInfoScore RandScore VMeasureScore", clusters)
    add("CalinskiHarabaszScore DaviesBouldinScore DunnIndex", points)

    add("ModifiedPanopticQuality PanopticQuality", panoptic, things={0}, stuffs={1})
    add("CompleteIntersectionOverUnion DistanceIntersectionOverUnion GeneralizedIntersectionOverUnion", boxes)
    add("IntersectionOverUnion", boxes)
    add("IntersectionOverUnion", boxes, class_metrics=True)

    one = {"data_range": 1.0}
    add("ErrorRelativeGlobalDimensionlessSynthesis RelativeAverageSpectralError", images)
    add("RootMeanSquaredErrorUsingSlidingWindow SpatialCorrelationCoefficient SpectralAngleMapper", images)
    add("SpectralDistortionIndex UniversalImageQualityIndex", images)
    add("VisualInformationFidelity", partial(images, 41))
    add("MultiScaleStructuralSimilarityIndexMeasure", partial(images, 64), kernel_size=3, betas=(0.5, 0.5), **one)
    add("PeakSignalNoiseRatio StructuralSimilarityIndexMeasure", images, **one)
    add("PeakSignalNoiseRatio", images, data_range=(0.2, 0.8))
    add("PeakSignalNoiseRatio StructuralSimilarityIndexMeasure", images, reduction="none", dim=(1, 2, 3), **one)
    table["StructuralSimilarityIndexMeasure"][-1][1].pop("dim")
    add("PeakSignalNoiseRatioWithBlockedEffect", partial(images, channels=1), **one)
    add("QualityWithNoReference SpatialDistortionIndex", sharpening)
    add("TotalVariation", images_alone)
    add("TotalVariation", images_alone, reduction="none")

    def features():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(192, 4))

    add("MemorizationInformedFrechetInceptionDistance", real_or_not, feature=features)
    add("LipVertexError", vertices, mouth_map=[0, 2, 3])

    add("CramersV PearsonsContingencyCoefficient TheilsU TschuprowsT", clusters, **three)
    add("FleissKappa", ratings, mode="counts")

    add("ConcordanceCorrCoef ExplainedVariance KendallRankCorrCoef LogCoshError MeanAbsoluteError", numbers)
    add("MeanAbsolutePercentageError MeanSquaredError MeanSquaredLogError R2Score", numbers)
    add("NormalizedRootMeanSquaredError PearsonCorrCoef RelativeSquaredError SpearmanCorrCoef", numbers)
    add("SymmetricMeanAbsolutePercentageError TweedieDevianceScore WeightedMeanAbsolutePercentageError", numbers)
    add("ConcordanceCorrCoef PearsonCorrCoef SpearmanCorrCoef LogCoshError", partial(numbers, (2,)),
        num_outputs=2)  # fmt: skip
    for normalization in ("range", "std", "l2"):
        add("NormalizedRootMeanSquaredError", numbers, normalization=normalization)
    add("MinkowskiDistance", numbers, p=3)
    add("CriticalSuccessIndex", numbers, 0.5)
    add("CosineSimilarity", partial(numbers, (4,)))
    add("ContinuousRankedProbabilityScore", ensembles)
    add("JensenShannonDivergence KLDivergence", distributions)
    add("KLDivergence", distributions, reduction="none")

    for kind in "AUROC FallOut HitRate MAP MRR NormalizedDCG Precision RPrecision Recall".split():
        add(f"Retrieval{kind}", queries)
    add("RetrievalPrecisionRecallCurve", queries, max_k=3)
    add("RetrievalRecallAtFixedPrecision", queries, min_precision=0.3, max_k=3)
    add("RetrievalMAP", queries, empty_target_action="skip")

    add("DiceScore GeneralizedDiceScore HausdorffDistance MeanIoU", segments, **three)
    add("ProcrustesDisparity", shapes)

    add("CharErrorRate EditDistance MatchErrorRate WordErrorRate WordInfoLost WordInfoPreserved", sentences)
    add("BLEUScore CHRFScore ExtendedEditDistance SacreBLEUScore TranslationEditRate", translations)
    add("ROUGEScore", sentences, rouge_keys=("rouge1", "rougeL"))
    add("SQuAD", answers)
    add("Perplexity", tokens)

    made = inner
    add("ClasswiseWrapper", classes, made("MulticlassAccuracy", average=None, **three))
    add("MinMaxMetric", binary, made("BinaryAccuracy"))
    add("MultioutputWrapper", partial(numbers, (2,)), made("MeanSquaredError"), 2)
    add("MultitaskWrapper", tasks, lambda: {"a": made("BinaryAUROC")(), "b": made("MeanSquaredError")()})
    add("Running", binary, made("BinaryAccuracy"), window=2)
    add("BinaryTargetTransformer", numbers, made("BinaryAUROC"), threshold=0.6)
    add("LambdaInputTransformer", binary, made("BinaryAUROC"), transform_pred=lambda: lambda p: 1 - p)
    add("CompositionalMetric", binary, torch.add, made("BinaryAUROC"), made("BinaryAccuracy"))
    return table


def inner(name, **kwargs):
    """What makes another metric, when it is called."""

    def make():
        import torchmetrics.classification
        import torchmetrics.regression

        for room in (torchmetrics.classification, torchmetrics.regression):
            if hasattr(room, name):
                return getattr(room, name)(**kwargs)
        raise AttributeError(name)

    return make


LEFT_OUT = {
    "BaseAggregator": "abstract",
    "Metric": "abstract",
    "MetricInputTransformer": "abstract",
    "BootStrapper": "refused",
    "ClusterAccuracy": "needs torch_linear_assignment",
    "MeanAveragePrecision": "needs pycocotools",
    "BERTScore": "downloads weights",
    "CLIPImageQualityAssessment": "downloads weights",
    "CLIPScore": "downloads weights",
    "InfoLM": "downloads weights",
    "DeepImageStructureAndTextureSimilarity": "downloads weights",
    "LearnedPerceptualImagePatchSimilarity": "downloads weights",
    "PerceptualPathLength": "is updated with a generator",
}

ROOMS = (
    "aggregation audio classification clustering detection image multimodal nominal regression retrieval segmentation "
    "shape text video wrappers"
).split()


def torchmetrics_classes() -> dict:
    """Every metric that torchmetrics shows, by name."""
    import torchmetrics
    from torchmetrics.metric import CompositionalMetric

    found = {"CompositionalMetric": CompositionalMetric}
    for room in ROOMS:
        module = importlib.import_module(f"torchmetrics.{room}")
        for name in getattr(module, "__all__", dir(module)):
            thing = getattr(module, name, None)
            if inspect.isclass(thing) and issubclass(thing, torchmetrics.Metric):
                found[name] = thing
    return found


def make(cls, args, kwargs):
    """An object of a class; arguments that are functions of ours are called for what they make."""

    def filled(x):
        return x() if inspect.isfunction(x) and x.__module__ == __name__ else x

    return cls(*map(filled, args), **{k: filled(v) for k, v in kwargs.items()})


# torcheval


def torcheval_table() -> dict:
    """Of each class by name: a list of (arguments, data)."""
    table: dict = {}
    add = partial(_add, table)
    add("BinaryAUROC BinaryAUPRC BinaryAccuracy BinaryBinnedAUPRC BinaryBinnedAUROC", binary)
    add("BinaryBinnedPrecisionRecallCurve BinaryConfusionMatrix BinaryF1Score BinaryPrecision", binary)
    add("BinaryPrecisionRecallCurve BinaryRecall", binary)
    table["BinaryBinnedPrecisionRecallCurve"] = [((), {"threshold": 5}, binary)]
    add("BinaryNormalizedEntropy", binary_floats)
    add("BinaryRecallAtFixedPrecision", binary, min_precision=0.5)
    three = {"num_classes": 3}
    add("MulticlassAccuracy MulticlassF1Score MulticlassPrecision MulticlassRecall", classes)
    add("MulticlassAccuracy MulticlassF1Score MulticlassPrecision MulticlassRecall", classes, average="macro", **three)
    add("MulticlassAUPRC MulticlassAUROC MulticlassBinnedAUPRC MulticlassBinnedAUROC", classes, **three)
    add("MulticlassBinnedPrecisionRecallCurve MulticlassPrecisionRecallCurve", classes)
    table["MulticlassBinnedPrecisionRecallCurve"] = [((), {"num_classes": 3, "threshold": 5}, classes)]
    add("MulticlassConfusionMatrix", classes, 3)
    label = {"num_labels": 3}
    add("MultilabelAccuracy TopKMultilabelAccuracy", labels)
    table["TopKMultilabelAccuracy"] = [((), {"k": 2}, labels)]
    add("MultilabelAUPRC MultilabelBinnedAUPRC MultilabelPrecisionRecallCurve", labels, **label)
    add("MultilabelBinnedPrecisionRecallCurve", labels, num_labels=3, threshold=5)
    add("MultilabelRecallAtFixedPrecision", labels, num_labels=3, min_precision=0.5)
    add("AUC", numbers_in_rows)
    add("MeanSquaredError R2Score", numbers)
    add("Cat Max Mean Min Sum", values)
    add("ClickThroughRate", clicks)
    add("WeightedCalibration", binary_floats)
    add("HitRate ReciprocalRank", classes)
    add("RetrievalPrecision", binary)
    add("Perplexity", tokens)
    add("BLEUScore", translations, n_gram=2)
    add("WordErrorRate WordInformationLost WordInformationPreserved", sentences)
    add("PeakSignalNoiseRatio", images)
    add("PeakSignalNoiseRatio", images, data_range=1.0)
    window = {"max_num_updates": 3}
    add("WindowedBinaryAUROC", binary, max_num_samples=6)
    add("WindowedBinaryNormalizedEntropy WindowedMeanSquaredError", binary_floats, **window)
    add("WindowedClickThroughRate", clicks, **window)
    add("WindowedWeightedCalibration", binary_floats, **window)
    return table


@seeded
def binary_floats(n, rand, randint):
    return rand(n), randint(2, (n,)).double()


@seeded
def numbers_in_rows(n, rand, randint):
    return rand(n), rand(n)


@seeded
def clicks(n, rand, randint):
    return (randint(2, (n,)),)


TORCHEVAL_LEFT_OUT = {
    "Metric": "abstract",
    "Throughput": "is updated with seconds",
    "FrechetAudioDistance": "needs torchaudio",
    "FrechetInceptionDistance": "downloads weights",
}


def torcheval_classes() -> dict:
    """Every metric that torcheval shows, by name."""
    import torcheval.metrics

    things = {name: getattr(torcheval.metrics, name) for name in dir(torcheval.metrics)}
    return {n: t for n, t in things.items() if inspect.isclass(t) and issubclass(t, torcheval.metrics.Metric)}
