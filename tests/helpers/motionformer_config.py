"""A config as Motionformer saves it in its checkpoints: keys of this package, and others."""

from __future__ import annotations

import copy
from typing import Any

# Motionformer's keys that this package lacks, with Motionformer's defaults.
FOREIGN: dict[str, Any] = {
    "BN": {"NORM_TYPE": "batchnorm", "NUM_SPLITS": 1, "NUM_SYNC_DEVICES": 1},
    "TRAIN": {"CHECKPOINT_CLEAR_NAME_PATTERN": []},
    "TEST": {"SHUFFLE_FRAMES": False},
    "X3D": {"WIDTH_FACTOR": 1.0, "DEPTH_FACTOR": 1.0, "BOTTLENECK_FACTOR": 1.0, "DIM_C5": 2048}
    | {"DIM_C1": 12, "SCALE_RES2": False, "BN_LIN5": False, "CHANNELWISE_3x3x3": True},
    "MODEL": {"DROPCONNECT_RATE": 0.0, "HEAD_ACT": "softmax"},
    "DATA": {"DECODING_BACKEND": "pyav", "MULTI_LABEL": False, "ENSEMBLE_METHOD": "sum"},
    "MIXUP": {"MIXUP_ALPHA": 0.0, "CUTMIX_MINMAX": None, "MIXUP_PROB": 1.0}
    | {"MIXUP_SWITCH_PROB": 0.5, "MIXUP_MODE": "batch"},
    "SOLVER": {"BASE_LR_SCALE_NUM_SHARDS": False},
    "LOG_MODEL_INFO": False,
    "USE_SBATCH": True,
    "BENCHMARK": {"NUM_EPOCHS": 5, "LOG_PERIOD": 100, "SHUFFLE": True},
    "MULTIGRID": {"EPOCH_FACTOR": 1.5, "SHORT_CYCLE": False, "SHORT_CYCLE_FACTORS": [0.5, 0.707]}
    | {"LONG_CYCLE": False, "LONG_CYCLE_FACTORS": [[0.25, 0.707], [1, 1]], "BN_BASE_SIZE": 8}
    | {"EVAL_FREQ": 3, "LONG_CYCLE_SAMPLING_RATE": 0, "DEFAULT_B": 0, "DEFAULT_T": 0}
    | {"DEFAULT_S": 0},
    "TENSORBOARD": {"PREDICTIONS_PATH": "", "CLASS_NAMES_PATH": "", "CATEGORIES_PATH": ""}
    | {"CONFUSION_MATRIX": {"ENABLE": False, "FIGSIZE": [8, 8], "SUBSET_PATH": ""}}
    | {"HISTOGRAM": {"ENABLE": False, "SUBSET_PATH": "", "TOPK": 10, "FIGSIZE": [8, 8]}}
    | {"WRONG_PRED_VIS": {"ENABLE": False, "TAG": "Incorrect", "SUBSET_PATH": ""}}
    | {"MODEL_VIS": {"ENABLE": False, "GRAD_CAM": {"ENABLE": True, "LAYER_LIST": []}}},
    "DEMO": {"ENABLE": False, "LABEL_FILE_PATH": "", "WEBCAM": -1, "INPUT_VIDEO": "", "FPS": 30}
    | {"OUTPUT_FPS": -1, "VIS_MODE": "thres", "COMMON_CLASS_NAMES": ["walk", "sit"]},
    "EPICKITCHENS": {"VISUAL_DATA_DIR": "/data", "TRAIN_LIST": "EPIC_100_train.pkl"}
    | {"TEST_SPLIT": "validation", "TRAIN_PLUS_VAL": False},
}
# Keys of this package and of pyslowfast 1.0 that Motionformer lacks.
_LACKING = (
    *("DATA.CROP_SIZE", "DATA.MAX_BAD_SHARE", "DATA.RAND_AUGMENT", "DEVICE", "ALLOW_TF32"),
    *("DIST_TIMEOUT", "CUDNN_BENCHMARK", "MODEL.COMPILE", "MODEL.ACT_CHECKPOINT"),
    *("DETERMINISTIC", "VIT.ACT_CHECKPOINT_KEEP", "TRAIN.PROFILE"),
    *("MIXUP.ENABLE", "MIXUP.ALPHA", "MIXUP.PROB", "MIXUP.SWITCH_PROB", "SOLVER.LAYER_DECAY"),
    *("SOLVER.EMA_DECAY", "SOLVER.PRECISION", "SOLVER.ACCUMULATE_STEPS", "SOLVER.REFERENCE_BATCH"),
    *("TEST.USE_EMA", "TRAIN.ACCEPT_CHANGES", "TRAIN.CHECKPOINT_BEST", "TRAIN.CHECKPOINT_KEEP"),
    *("TRAIN.CHECKPOINT_ITERATIONS", "VIT.INFLATE", "VIT.KERNELS"),
)


def motionformer_config(tree: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A config of this package as Motionformer would have saved it; `changes` replace values."""
    tree = copy.deepcopy(tree)
    for key in _LACKING:
        node, _, name = key.rpartition(".")
        (tree[node] if node else tree).pop(name, None)
    # Options of the estimators are nodes of this package.
    tree["VIT"] = {key: x for key, x in tree["VIT"].items() if not isinstance(x, dict)}
    tree["VIT"]["MLP_RATIO"] = int(tree["VIT"]["MLP_RATIO"])
    for part in (copy.deepcopy(FOREIGN), changes):
        for node, value in part.items():
            if isinstance(value, dict):
                tree.setdefault(node, {}).update(value)
            else:
                tree[node] = value
    return tree
