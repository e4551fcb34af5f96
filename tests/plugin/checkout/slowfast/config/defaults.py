"""The config keys that a checkout's training step and test read, and some others."""

from fvcore.common.config import CfgNode

_C = CfgNode()
_C.BN = CfgNode({"USE_PRECISE_STATS": False, "WEIGHT_DECAY": 0.0})
_C.TRAIN = CfgNode(
    {
        "ENABLE": True,
        "DATASET": "kinetics",
        "BATCH_SIZE": 64,
        "AUTO_RESUME": True,
        "CHECKPOINT_FILE_PATH": "",
        "CHECKPOINT_EPOCH_RESET": False,
        "CHECKPOINT_IN_INIT": False,
        "CHECKPOINT_CLEAR_NAME_PATTERN": (),
        "KILL_LOSS_EXPLOSION_FACTOR": 0.0,
        "MIXED_PRECISION": False,
    }
)
_C.AUG = CfgNode({"ENABLE": False, "NUM_SAMPLE": 1, "RE_PROB": 0.25})
_C.MIXUP = CfgNode({"ENABLE": False, "ALPHA": 0.8, "LABEL_SMOOTH_VALUE": 0.1})
_C.TEST = CfgNode(
    {
        "ENABLE": True,
        "DATASET": "kinetics",
        "BATCH_SIZE": 8,
        "CHECKPOINT_FILE_PATH": "",
        "NUM_ENSEMBLE_VIEWS": 10,
        "NUM_TEMPORAL_CLIPS": [],
        "NUM_SPATIAL_CROPS": 3,
    }
)
_C.MODEL = CfgNode(
    {
        "ARCH": "slowfast",
        "MODEL_NAME": "SlowFast",
        "NUM_CLASSES": 400,
        "LOSS_FUNC": "cross_entropy",
        "SINGLE_PATHWAY_ARCH": ["2d", "c2d", "i3d", "slow", "x3d", "mvit", "maskmvit"],
        "MULTI_PATHWAY_ARCH": ["slowfast"],
        "HEAD_ACT": "softmax",
        "ACT_CHECKPOINT": False,
        "DETACH_FINAL_FC": False,
        "FROZEN_BN": False,
        "FP16_ALLREDUCE": False,
    }
)
_C.MASK = CfgNode({"ENABLE": False, "MAE_ON": False})
_C.MULTIGRID = CfgNode({"SHORT_CYCLE": False, "LONG_CYCLE": False, "DEFAULT_S": 0})
_C.BENCHMARK = CfgNode({"NUM_EPOCHS": 5, "LOG_PERIOD": 100, "SHUFFLE": True})
_C.MVIT = CfgNode({"DEPTH": 16, "NUM_HEADS": 1})
_C.SLOWFAST = CfgNode({"ALPHA": 8})
_C.DATA = CfgNode(
    {
        "PATH_TO_DATA_DIR": "",
        "NUM_FRAMES": 8,
        "SAMPLING_RATE": 8,
        "MEAN": [0.45, 0.45, 0.45],
        "STD": [0.225, 0.225, 0.225],
        "TRAIN_JITTER_SCALES": [256, 320],
        "TRAIN_CROP_SIZE": 224,
        "TEST_CROP_SIZE": 256,
        "TARGET_FPS": 30,
        "DECODING_BACKEND": "torchvision",
        "USE_OFFSET_SAMPLING": False,
        "MULTI_LABEL": False,
        "REVERSE_INPUT_CHANNEL": False,
        "ENSEMBLE_METHOD": "sum",
    }
)
_C.SOLVER = CfgNode(
    {
        "BASE_LR": 0.1,
        "WEIGHT_DECAY": 1e-4,
        "OPTIMIZING_METHOD": "sgd",
        "ZERO_WD_1D_PARAM": False,
        "CLIP_GRAD_VAL": None,
        "CLIP_GRAD_L2NORM": None,
        "LARS_ON": False,
        "LAYER_DECAY": 1.0,
        "BETAS": (0.9, 0.999),
    }
)
_C.DETECTION = CfgNode({"ENABLE": False})
_C.TASK = ""
_C.NUM_GPUS = 1
_C.NUM_SHARDS = 1
_C.RNG_SEED = 1
_C.OUTPUT_DIR = "."
_C.LOG_MODEL_INFO = True


def get_cfg():
    return _C.clone()
