"""Callbacks: each file is one subject, and none imports the learner.

At every event callbacks run in ascending `order`, and at cleanups in descending order; those with the same order run as
they were added. The orders of all callbacks of the package, with those of the other folders:

  -20000  _Trained: leaves out the end of a training that was over in an earlier process
     -20  StandIn: takes a sample that counts nothing away, before others look at the batch that is over
     -10  TrainEvalCallback: sets modes, counters and the sample order, which all others need
      -9  TerminateOnNaNCallback: checks the loss before it is scaled
      -5  GradientNoiseScale: sees gradients before others change them, and leaves a batch before others do
      -3  BatchTransform: before samples are mixed, and before others see the batch
      -2  CutMix, MixUp: mix the losses before others add to them
      -1  ChannelsLast: before the model is wrapped or compiled
       0  BnFreeze, DataParallelCallback, MCDropout: the default, also for callbacks of your own
       1  Compile: after DataParallelCallback has wrapped the model
       2  ActivationCheckpointing: the same, and before DistributedCallback wraps it
       6  GradientAccumulation: decides whether a step is due before the callbacks that act on steps
      10  MixedPrecision: unscales the gradients before anything reads them
      11  GradientClip: clips unscaled gradients
      11  DistributedCallback, LeftBatch: replace the loader before callbacks use it, and see to a batch without data
      12  CarriedState: hooks the model that all the above have wrapped, and asks the loader which rows a rank has
      12  OverfitBatch, ShortEpochCallback, _SameBatch: shorten the loader that DistributedCallback has set
      13  SplitBatch: takes the place of the forward pass that all the above have set
      13  ScalingMonitor: waits for the loader that all the above have set
      14  ActivationStats: hooks the modules that all the above have put in their places
      15  EMA, SWA: put the average into the model before others look at it
      16  _MakeWhole: gathers a sharded model, with its average, before others save or load it
      16  _Statistics: computes BatchNorm's statistics with the average
      49  _Watch: sees batches and losses as they come to the model
      50  GatherPredictions, KeepPredictions, Recorder, Validation: record a batch after others may have changed it
      51  Logger: writes what the recorder has recorded
      51  JSONLogger, TensorBoardCallback, WandbCallback, CometCallback, MLflowCallback, TrackioCallback: such
          loggers
      60  ParamScheduler, TorchScheduler: change rates after the recorder has recorded them
      60  ProgressCallback, TrackerCallback: read what the recorder has recorded
      61  SaveModelCallback: saves before the next two change the rate or end the fit
      62  ReduceLROnPlateau: changes the rate before the next may end the fit
      63  EarlyStoppingCallback: ends the fit after the other trackers have seen the row
      64  Report: may end the process of a trial, after all trackers
      65  ShowGraphCallback: draws what the recorder has recorded
      70  DriftCheck: compares the ranks after all the above
     100  LRFinder, StepBudget, TrialSteps: end training after the others have seen the last step
     101  ValidateEvery: not called at the last step of a budget, after which the epoch's validation follows
     102  CSVLogger: writes the rows that the recorder and ValidateEvery have added
    1000  Profiler, StepCheck, _Notes: look at what all others have done
    9999  _GoOn: loads a state after all others have begun
   10000  CheckpointCallback: saves what all others have come to, and loads it after they have begun
"""
