"""The table of config keys: default, effect of a change, meaning, allowed values.

Motionformer's keys keep their names and defaults, so that Motionformer's YAML files load unchanged.
PySlowFast 1.0 has further keys. They stay in the config, because PySlowFast's files may set them,
but this package does not read them. docs/config.md is generated from this table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any, NamedTuple

from slowfast_lara.attention import ESTIMATORS, estimator_options
from slowfast_lara.attention.kernels.choice import KERNELS
from slowfast_lara.attention.registry import Option
from slowfast_lara.data.rand_augment import NOTATION
from slowfast_lara.models.act_checkpoint import KEPT
from slowfast_lara.models.motionformer import ACTIVATIONS, GELUS, POSITIONS
from slowfast_lara.models.space_time import ATTENTION_LAYERS
from slowfast_lara.models.weights.pretrained import INFLATIONS
from slowfast_lara.user_code import OWN_CODE


class Affects(IntEnum):
    """What a changed key affects when a run resumes; each level includes the lower levels."""

    # Changes that need no TRAIN.ACCEPT_CHANGES: paths, logging, hardware, the batch size that fits
    # the hardware, tests, trade-offs between memory and time, and the initial weights (which a
    # resumed run does not read).
    NOTHING = 0
    TRAINING = 1  # affects the training after the resume
    ATTENTION = 2  # affects the model's output by a different attention, which users may try
    MODEL = 3  # affects the model's output in any other way
    WEIGHTS = 4  # affects the meaning of the weights, but not their shapes


NOTHING, TRAINING, ATTENTION, MODEL, WEIGHTS = Affects


class Rule(NamedTuple):
    """A condition on the value of one key."""

    text: str  # completes the message "must be ..."
    holds: Callable[[Any], bool]
    choices: tuple[Any, ...] = ()

    def problem(self, value: Any) -> str | None:
        """The reason why a value is invalid, or None if it is valid."""
        return None if self.holds(value) else f"must be {self.text}"


def one_of(*choices: Any) -> Rule:
    text = ", ".join(map(str, choices))
    return Rule(f"one of {text}" if len(choices) > 1 else text, lambda x: x in choices, choices)


def _are_numbers(values: Any) -> bool:
    return all(isinstance(value, (int, float)) for value in values)


ANY = Rule("any value of its type", lambda x: True)
AT_LEAST_0 = Rule("at least 0", lambda x: x >= 0)
AT_LEAST_1 = Rule("at least 1", lambda x: x >= 1)
POSITIVE = Rule("above 0", lambda x: x > 0)
BELOW_1 = Rule("at least 0 and below 1", lambda x: 0 <= x < 1)
PROBABILITY = Rule("from 0 to 1", lambda x: 0 <= x <= 1)
NUMBERS = Rule("a list of numbers", _are_numbers)
POSITIVES = Rule("a list of positive numbers", lambda x: _are_numbers(x) and min(x, default=1) > 0)
SHORT_SIDES = Rule(
    "[smallest, largest], two numbers above 0",
    lambda x: _are_numbers(x) and len(x) == 2 and 0 < x[0] <= x[1],
)
BATCH_RANGE = Rule(
    "[] or [first, last], integers with 1 <= first <= last",
    lambda x: not x or (len(x) == 2 and {*map(type, x)} == {int} and 1 <= x[0] <= x[1]),
)
RAND_AUGMENT = Rule(
    "of the form rand-m<magnitude>-n<operations>[-mstd<deviation>][-inc]",
    lambda x: bool(NOTATION.fullmatch(x)),
)


class Key(NamedTuple):
    default: Any  # `...` keeps PySlowFast's default
    affects: Affects
    allowed: Rule | Option
    meaning: str
    shared: bool = False  # also read from configs of PySlowFast checkouts or Motionformer


def shared(default: Any, affects: Affects, allowed: Rule | Option, meaning: str) -> Key:
    """A `Key` with `shared` True: it affects the model, its input or its test."""
    return Key(default, affects, allowed, meaning, shared=True)


def all_keys() -> dict[str, Key]:
    """KEYS, with the names of the registered estimators and their options VIT.<NAME>.<OPTION>."""
    kind = "VIT.APPROX_ATTN_TYPE"
    known = one_of("none", *ESTIMATORS)
    known = known._replace(text=f"{known.text} ({OWN_CODE})")
    options = {
        f"VIT.{name}.{key}".upper(): shared(option.default, ATTENTION, option, option.meaning)
        for name in ESTIMATORS
        for key, option in estimator_options(name).items()
    }
    return {**KEYS, kind: KEYS[kind]._replace(allowed=known), **options}


def get_value(tree: Any, key: str, default: Any = ...) -> Any:
    """The value of a dotted key in nested mappings; if it is missing, `default` or KeyError."""
    for part in key.split("."):
        if not isinstance(tree, Mapping) or part not in tree:
            if default is ...:
                raise KeyError(key)
            return default
        tree = tree[part]
    return tree


def set_value(tree: dict[str, Any], key: str, value: Any) -> None:
    """Set a dotted key in nested mappings; missing nodes are added."""
    *path, name = key.split(".")
    for part in path:
        tree = tree.setdefault(part, type(tree)())
    tree[name] = value


# fmt: off
KEYS = {
    "TRAIN.ENABLE": Key(..., NOTHING, ANY, "train the model"),
    "TRAIN.DATASET": shared(..., TRAINING, ANY,
        "Kinetics, Ssv2, Epickitchens, Charades or a registered name; case does not matter"),
    "TRAIN.BATCH_SIZE": Key(..., NOTHING, AT_LEAST_1,
        "clips per batch on one node, all of its GPUs together; on all nodes: times NUM_SHARDS"),
    "TRAIN.EVAL_PERIOD": Key(..., NOTHING, AT_LEAST_1, "epochs between validations"),
    "TRAIN.CHECKPOINT_PERIOD": Key(..., NOTHING, AT_LEAST_1, "epochs between checkpoints"),
    "TRAIN.AUTO_RESUME": Key(..., NOTHING, ANY, "resume from the newest checkpoint in OUTPUT_DIR"),
    "TRAIN.MAX_RESTARTS": Key(0, NOTHING, AT_LEAST_0,
        "maximum number of restarts from the newest checkpoint after failures; no effect under "
        "torchrun, which has --max-restarts"),
    "TRAIN.ACCEPT_CHANGES": Key(False, NOTHING, ANY,
        "resume although the training list or keys that affect training changed"),
    "TRAIN.CHECKPOINT_FILE_PATH": Key(..., NOTHING, ANY,
        "video checkpoint to start from, or to resume; see CHECKPOINT_EPOCH_RESET"),
    "TRAIN.CHECKPOINT_EPOCH_RESET": Key(False, NOTHING, ANY,
        "True: train from the weights of CHECKPOINT_FILE_PATH; False: resume the "
        "training of that checkpoint, which must have the same settings and epochs left"),
    "TRAIN.CHECKPOINT_ITERATIONS": Key(0, NOTHING, AT_LEAST_0,
        "iterations between checkpoints within an epoch (0: only at the end of an epoch)"),
    "TRAIN.CHECKPOINT_KEEP": Key(0, NOTHING, AT_LEAST_0,
        "number of newest checkpoints to keep besides the best (0: all)"),
    "TRAIN.CHECKPOINT_BEST": Key(False, NOTHING, ANY, "keep the checkpoint of the best validation"),
    "TRAIN.PROFILE": Key([], NOTHING, BATCH_RANGE,
        "[first, last] training batches, counted from 1 when the run starts, whose profile rank 0 "
        "writes to OUTPUT_DIR as a Chrome trace (empty: none)"),
    "TRAIN.CHECKPOINT_TYPE": Key(..., NOTHING, one_of("pytorch"), "checkpoint format"),
    "TRAIN.CHECKPOINT_INFLATE": Key(..., NOTHING, one_of(False), "not supported; use VIT.INFLATE"),
    "TEST.ENABLE": Key(..., NOTHING, ANY, "test the model, after training if that is enabled"),
    "TEST.DATASET": shared(..., NOTHING, ANY, "as TRAIN.DATASET, for the test"),
    "TEST.BATCH_SIZE": Key(..., NOTHING, AT_LEAST_1,
        "views per forward pass on one node, all of its GPUs together"),
    "TEST.CHECKPOINT_FILE_PATH": Key(..., NOTHING, ANY, "checkpoint to test (empty: the newest)"),
    "TEST.CHECKPOINT_TYPE": Key(..., NOTHING, one_of("pytorch"), "checkpoint format"),
    "TEST.NUM_ENSEMBLE_VIEWS": shared(..., NOTHING, AT_LEAST_1, "clips per video, evenly spread"),
    "TEST.NUM_SPATIAL_CROPS": shared(..., NOTHING, one_of(1, 3),
        "crops per clip: centre, or three along the longer side"),
    "TEST.USE_EMA": Key(True, NOTHING, ANY, "use the EMA weights of a checkpoint that has them"),
    "TEST.SAVE_RESULTS_PATH": Key("", NOTHING, ANY,
        "name of an .npz file in OUTPUT_DIR for the scores of all test videos (empty: no file)"),
    "MODEL.MODEL_NAME": shared("VisionTransformer", MODEL, one_of("VisionTransformer"),
        "class of the model"),
    "MODEL.ARCH": Key("slow", NOTHING, ANY, "no effect; must be in MODEL.SINGLE_PATHWAY_ARCH"),
    "MODEL.SINGLE_PATHWAY_ARCH": Key(["c2d", "i3d", "slow", "slowonly"], NOTHING, ANY,
        "names of PySlowFast's single-pathway models: the allowed values of MODEL.ARCH"),
    "MODEL.NUM_CLASSES": shared(..., MODEL, AT_LEAST_1,
        "number of classes; with the dataset Epickitchens, of verbs"),
    "MODEL.LOSS_FUNC": Key(..., MODEL, one_of("cross_entropy", "bce", "bce_logit"),
        "loss; bce and bce_logit are binary cross-entropy, which DATA.MULTI_LABEL requires"),
    "MODEL.HEAD_ACT": Key("softmax", NOTHING, one_of("softmax", "sigmoid"),
        "no effect: scores are softmax or, with DATA.MULTI_LABEL, sigmoid"),
    "MODEL.ACT_CHECKPOINT": Key(False, NOTHING, ANY,
        "activation checkpointing of each block: less memory, a third more time"),
    "MODEL.COMPILE": Key(False, NOTHING, ANY, "apply torch.compile to the model"),
    "VIT.PATCH_SIZE": shared(16, MODEL, AT_LEAST_1, "height and width of a patch in pixels"),
    "VIT.PATCH_SIZE_TEMP": shared(2, MODEL, AT_LEAST_1, "frames per patch (1: 2-D patches)"),
    "VIT.CHANNELS": shared(3, MODEL, AT_LEAST_1, "colour channels"),
    "VIT.EMBED_DIM": shared(768, MODEL, AT_LEAST_1, "D, the width of a token"),
    "VIT.DEPTH": shared(12, MODEL, AT_LEAST_1, "number of blocks"),
    "VIT.NUM_HEADS": shared(12, WEIGHTS, AT_LEAST_1, "h, attention heads"),
    "VIT.MLP_RATIO": shared(4.0, MODEL, POSITIVE, "width of the MLPs' hidden layer / EMBED_DIM"),
    "VIT.QKV_BIAS": shared(True, MODEL, ANY, "biases in the query, key and value projections"),
    "VIT.VIDEO_INPUT": shared(True, MODEL, ANY, "False: the model takes images [B, 3, H, W]"),
    "VIT.TEMPORAL_RESOLUTION": shared(8, MODEL, AT_LEAST_1,
        "F, temporal tokens: DATA.NUM_FRAMES / VIT.PATCH_SIZE_TEMP"),
    "VIT.USE_MLP": shared(False, MODEL, ANY, "hidden layer before the classifier"),
    "VIT.HEAD_ACT": shared("tanh", MODEL, one_of(*ACTIVATIONS),
        "activation of the hidden layer of USE_MLP"),
    "VIT.DROP": shared(0.0, TRAINING, BELOW_1, "dropout in projections and MLPs"),
    "VIT.DROP_PATH": shared(0.0, TRAINING, BELOW_1,
        "stochastic depth rate of the last block; rises linearly from 0 at the first block"),
    "VIT.HEAD_DROPOUT": shared(0.0, TRAINING, BELOW_1, "dropout before the classifier"),
    "VIT.POS_DROPOUT": shared(0.0, TRAINING, BELOW_1, "dropout after the position embedding"),
    "VIT.ATTN_DROPOUT": shared(0.0, TRAINING, BELOW_1, "attention dropout; exact attention only"),
    "VIT.IM_PRETRAINED": shared(True, NOTHING, ANY, "start from the weights in PRETRAINED_WEIGHTS"),
    "VIT.PRETRAINED_WEIGHTS": shared("vit_1k", NOTHING, ANY,
        "weights file of an image model (configs/README.md lists sources)"),
    "VIT.INFLATE": shared("centre", NOTHING, one_of(*INFLATIONS),
        "how to make a 2-D patch embedding 3-D: copy to the centre frame, or average over frames"),
    "VIT.POS_EMBED": shared("separate", MODEL, one_of(*POSITIONS),
        "position embeddings: separate (for space and for time), joint, or sincos (fixed)"),
    "VIT.POS_CROP_SIZE": shared(224, MODEL, AT_LEAST_1,
        "crop size of the stored position embeddings; they are resized for other crops"),
    "VIT.POS_NUM_FRAMES": shared(0, MODEL, AT_LEAST_0,
        "frames of the stored position embeddings (0: DATA.NUM_FRAMES); they are resized for other "
        "DATA.NUM_FRAMES"),
    "VIT.CLS_TOKEN": shared(True, MODEL, ANY,
        "classify by the CLS token (False: by the mean of the tokens)"),
    "VIT.NUM_REGISTERS": shared(0, MODEL, AT_LEAST_0, "register tokens after CLS, as in DINOv2"),
    "VIT.GELU": shared("exact", WEIGHTS, one_of(*GELUS), "GELU: exact, or its tanh approximation"),
    "VIT.NORM_EPS": shared(1e-6, WEIGHTS, POSITIVE, "epsilon of the layer norms of blocks"),
    "VIT.FINAL_NORM_EPS": shared(1e-6, WEIGHTS, POSITIVE,
        "epsilon of the layer norm before the classifier"),
    "VIT.ATTN_LAYER": shared("trajectory", MODEL, one_of(*ATTENTION_LAYERS), "attention layer"),
    "VIT.USE_ORIGINAL_TRAJ_ATTN_CODE": shared(True, WEIGHTS, ANY,
        "temporal values: pooled tokens as in Motionformer's code (True), or projected, as in its "
        "paper (False)"),
    "VIT.APPROX_ATTN_TYPE": shared("none", ATTENTION, ANY,
        "estimator that replaces the softmax; none: exact attention"),
    "VIT.APPROX_ATTN_DIM": shared(128, ATTENTION, AT_LEAST_1,
        "number of landmarks C, of samples S, or of groups of keys per frame"),
    "VIT.KERNELS": shared("auto", NOTHING, one_of(*KERNELS),
        "fused kernels (triton) or PyTorch operations for LARA, Performer, merged keys and the "
        "temporal stage; "
        "auto: the faster of the two, measured before the first step on NVIDIA GPUs of compute "
        "capability 8.0 or higher; elsewhere and in float32, PyTorch"),
    "VIT.ACT_CHECKPOINT_KEEP": Key("nothing", NOTHING, one_of(*KEPT),
        "activations that MODEL.ACT_CHECKPOINT stores: nothing, or the outputs of fused attentions "
        "(attention), which are then not recomputed"),
    "DATA.PATH_TO_DATA_DIR": Key(..., NOTHING, ANY, "folder of the video lists"),
    "DATA.PATH_PREFIX": Key(..., NOTHING, ANY,
        "base of relative paths in a list (empty: working directory, then the list's folder)"),
    "DATA.PATH_LABEL_SEPARATOR": Key(" ", NOTHING, Rule("at least one character", bool),
        "separator of path and label in a list"),
    "DATA.MULTI_LABEL": Key(False, MODEL, ANY,
        "several classes per clip: sigmoid scores, binary cross-entropy, mean average precision"),
    "DATA.ENSEMBLE_METHOD": Key("sum", NOTHING, one_of("sum", "max"),
        "scores of a video: mean (sum) or maximum over its views"),
    "DATA.NUM_FRAMES": shared(..., MODEL, AT_LEAST_1, "frames per clip"),
    "DATA.SAMPLING_RATE": shared(..., MODEL, AT_LEAST_1,
        "stride between the frames of a clip, in video frames at DATA.TARGET_FPS; no effect with "
        "the dataset Ssv2"),
    "DATA.TARGET_FPS": shared(30, MODEL, AT_LEAST_1,
        "frame rate that SAMPLING_RATE refers to; also assumed for videos without a frame rate"),
    "DATA.MEAN": shared(..., MODEL, NUMBERS, "per-channel mean, subtracted from pixels in [0, 1]"),
    "DATA.STD": shared(..., MODEL, POSITIVES, "per-channel standard deviation"),
    "DATA.REVERSE_INPUT_CHANNEL": shared(False, MODEL, ANY, "BGR input, as in Motionformer's SSv2"),
    "DATA.TRAIN_JITTER_SCALES": shared(..., TRAINING, SHORT_SIDES,
        "range of the short side that training clips are scaled to"),
    "DATA.INV_UNIFORM_SAMPLE": Key(False, TRAINING, ANY,
        "draw 1 / (short side) uniformly, instead of the short side"),
    "DATA.TRAIN_CROP_SIZE": shared(..., TRAINING, AT_LEAST_1, "training and validation crop size"),
    "DATA.TEST_CROP_SIZE": shared(..., NOTHING, AT_LEAST_1, "test crop size"),
    "DATA.TEST_SHORT_SIDE": Key(0, NOTHING, AT_LEAST_0,
        "short side to which test videos are resized before cropping (0: DATA.TEST_CROP_SIZE)"),
    "DATA.TEST_RESIZE": Key("opencv", NOTHING, one_of("opencv", "pillow"),
        "bilinear resizing of test videos: opencv as in PySlowFast, or pillow (with antialiasing, "
        "and the offset of the centre crop rounded down) as in Hugging Face transformers"),
    "DATA.USE_RANDOM_RESIZE_CROPS": Key(False, TRAINING, ANY,
        "crops of random area and aspect ratio instead of scale jitter and crop"),
    "DATA.RANDOM_FLIP": Key(True, TRAINING, ANY, "flip half of the clips if the dataset allows it"),
    "DATA.COLORJITTER": Key(False, TRAINING, ANY, "colour jitter of training clips, up to 40 %"),
    "DATA.USE_RAND_AUGMENT": Key(False, TRAINING, ANY, "RandAugment on training clips"),
    "DATA.RAND_AUGMENT": Key("rand-m20-n2-mstd0.5-inc", TRAINING, RAND_AUGMENT,
        "magnitude m, operations n, standard deviation mstd; inc: a larger magnitude never has a "
        "weaker effect"),
    "DATA.MAX_BAD_SHARE": Key(0.01, NOTHING, BELOW_1,
        "stop training if more than 5 videos and more than this fraction of all videos fail to "
        "decode (0: stop at the first)"),
    "DATA.GRAYSCALE": Key(False, TRAINING, ANY, "greyscale for a fifth of the training clips"),
    "DATA.GAUSSIAN": Key(False, TRAINING, ANY,
        "blur half of the training clips, sigma 0.1 to 2 pixels"),
    "DATA.RE_PROB": Key(0.0, TRAINING, PROBABILITY,
        "probability of random erasing: fill a rectangle, the same in all frames, with noise"),
    "DATA.USE_REPEATED_AUG": Key(False, TRAINING, ANY,
        "repeated augmentation: three random clips of the same video follow one another in the "
        "batches, so that an epoch has a third of the videos"),
    "EPICKITCHENS.VISUAL_DATA_DIR": Key("", NOTHING, ANY,
        "folder that has P01/rgb_frames/P01_101/frame_0000000001.jpg and so on (empty: "
        "DATA.PATH_TO_DATA_DIR)"),
    "EPICKITCHENS.ANNOTATIONS_DIR": Key("", NOTHING, ANY,
        "folder of the annotations (empty: DATA.PATH_TO_DATA_DIR)"),
    "EPICKITCHENS.TRAIN_LIST": Key("EPIC_100_train.csv", NOTHING, ANY,
        "training annotations; if the name ends in .pkl, the .csv file of that name"),
    "EPICKITCHENS.VAL_LIST": Key("EPIC_100_validation.csv", NOTHING, ANY, "as TRAIN_LIST"),
    "EPICKITCHENS.TEST_LIST": Key("EPIC_100_validation.csv", NOTHING, ANY, "as TRAIN_LIST"),
    "EPICKITCHENS.TEST_SPLIT": Key("validation", NOTHING, ANY, "no effect"),
    "EPICKITCHENS.TRAIN_PLUS_VAL": Key(False, TRAINING, ANY, "train on VAL_LIST too"),
    "EPICKITCHENS.NUM_NOUNS": Key(300, MODEL, AT_LEAST_1, "number of nouns"),
    "MIXUP.ENABLE": Key(False, TRAINING, ANY,
        "mix clips within a batch; training accuracy uses the label with the larger weight"),
    "MIXUP.ALPHA": Key(0.8, TRAINING, AT_LEAST_0,
        "mixup: the clip's own weight is drawn from Beta(ALPHA, ALPHA) (0: off)"),
    "MIXUP.CUTMIX_ALPHA": Key(1.0, TRAINING, AT_LEAST_0,
        "cutmix: the clip's own share of the area is drawn from Beta(CUTMIX_ALPHA, CUTMIX_ALPHA) "
        "(0: off)"),
    "MIXUP.PROB": Key(1.0, TRAINING, PROBABILITY, "probability that a batch is mixed"),
    "MIXUP.SWITCH_PROB": Key(0.5, TRAINING, PROBABILITY, "probability of cutmix rather than mixup"),
    "SOLVER.OPTIMIZING_METHOD": Key("adamw", TRAINING, one_of("sgd", "adam", "adamw"), "optimizer"),
    "SOLVER.BASE_LR": Key(..., TRAINING, POSITIVE,
        "base learning rate of the schedule, which follows the warm-up"),
    "SOLVER.REFERENCE_BATCH": Key(0, TRAINING, AT_LEAST_0,
        "effective batch size that BASE_LR is for; the learning rate is scaled linearly to the "
        "actual one (0: no scaling)"),
    "SOLVER.LR_POLICY": Key(..., TRAINING, one_of("cosine", "steps_with_relative_lrs"),
        "learning rate schedule"),
    "SOLVER.STEPS": Key(..., TRAINING, NUMBERS, "first epoch of each step of the schedule, from 0"),
    "SOLVER.LRS": Key(..., TRAINING, NUMBERS, "factor of BASE_LR in each step"),
    "SOLVER.COSINE_END_LR": Key(0.0, TRAINING, AT_LEAST_0, "final rate of the cosine schedule"),
    "SOLVER.MAX_EPOCH": Key(..., TRAINING, AT_LEAST_1, "epochs of training"),
    "SOLVER.WARMUP_EPOCHS": Key(0.0, TRAINING, AT_LEAST_0,
        "epochs of linear warm-up from WARMUP_START_LR; may be fractional"),
    "SOLVER.WARMUP_START_LR": Key(0.0, TRAINING, AT_LEAST_0, "first learning rate of the warm-up"),
    "SOLVER.MOMENTUM": Key(..., TRAINING, ANY, "momentum of sgd"),
    "SOLVER.DAMPENING": Key(..., TRAINING, ANY, "dampening of sgd's momentum"),
    "SOLVER.NESTEROV": Key(..., TRAINING, ANY, "Nesterov momentum of sgd"),
    "SOLVER.WEIGHT_DECAY": Key(..., TRAINING, AT_LEAST_0,
        "weight decay; not applied to biases, norms, position embeddings, CLS and registers"),
    "SOLVER.SMOOTHING": Key(0.0, TRAINING, BELOW_1, "label smoothing, also of mixed labels"),
    "SOLVER.LAYER_DECAY": Key(1.0, TRAINING, Rule("above 0 and at most 1", lambda x: 0 < x <= 1),
        "layer-wise learning rate decay: the learning rate of the k-th block from the end is "
        "multiplied by LAYER_DECAY**k; the embeddings count as the block before the first"),
    "SOLVER.EMA_DECAY": Key(0.0, TRAINING, BELOW_1,
        "decay of the EMA weights; limited to (1 + n) / (10 + n) at step n (0: no EMA)"),
    "SOLVER.CLIP_GRAD": Key(None, TRAINING, Rule("above 0 or None", lambda x: x is None or x > 0),
        "maximum gradient norm (None: no clipping)"),
    "SOLVER.ACCUMULATE_STEPS": Key(1, TRAINING, AT_LEAST_1, "gradient accumulation steps"),
    "SOLVER.USE_MIXED_PRECISION": shared(False, TRAINING, ANY, "autocast to SOLVER.PRECISION"),
    "SOLVER.PRECISION": Key("auto", TRAINING, one_of("auto", "float16", "bfloat16"),
        "autocast dtype; float16 uses loss scaling; auto: bfloat16 on GPUs that support it, "
        "float16 on other GPUs, float32 on a CPU"),
    "DATA_LOADER.NUM_WORKERS": Key(..., NOTHING, AT_LEAST_0, "DataLoader workers per process"),
    "DATA_LOADER.PIN_MEMORY": Key(..., NOTHING, ANY, "pinned memory for copies to the GPU"),
    "DATA_LOADER.ENABLE_MULTI_THREAD_DECODE": Key(..., NOTHING, ANY, "multi-threaded decoding"),
    "NUM_GPUS": Key(..., NOTHING, AT_LEAST_0, "GPUs per node (0: use the CPU)"),
    "DEVICE": Key("auto", NOTHING, one_of("auto", "mps"),
        "auto: NUM_GPUS NVIDIA GPUs, or the CPU; mps: an Apple GPU, with NUM_GPUS 0"),
    "NUM_SHARDS": Key(..., NOTHING, AT_LEAST_1, "number of nodes"),
    "SHARD_ID": Key(..., NOTHING, AT_LEAST_0, "index of this node, from 0"),
    "DIST_BACKEND": Key(..., NOTHING, ANY, "torch.distributed backend for GPU tensors"),
    "DIST_TIMEOUT": Key(1800, NOTHING, AT_LEAST_1, "seconds that a rank waits for the other ranks"),
    "CUDNN_BENCHMARK": Key(False, NOTHING, ANY, "let cuDNN measure and use its fastest algorithms"),
    "DETERMINISTIC": Key(False, NOTHING, ANY,
        "use only deterministic algorithms: slower, but needed for reproducible runs on GPUs"),
    "ALLOW_TF32": Key(False, TRAINING, ANY, "allow TF32 in matmuls and convolutions on GPUs"),
    "RNG_SEED": shared(..., TRAINING, AT_LEAST_0, "seed of all random numbers"),
    "OUTPUT_DIR": Key(..., NOTHING, ANY, "folder of the run"),
    "IMPORTS": Key([], NOTHING, ANY,
        "record of the --import arguments; nothing is imported because of this key"),
    "LOG_PERIOD": Key(..., NOTHING, AT_LEAST_1, "iterations between log lines"),
    "TENSORBOARD.ENABLE": Key(False, NOTHING, ANY, "write TensorBoard logs"),
    "TENSORBOARD.LOG_DIR": Key("", NOTHING, ANY, "log folder (empty: OUTPUT_DIR/tensorboard)"),
    "WANDB.ENABLE": Key(False, NOTHING, ANY, "log to Weights & Biases (extra `wandb`)"),
    "DETECTION.ENABLE": Key(..., TRAINING, one_of(False), "PySlowFast's detection: not supported"),
    "BN.USE_PRECISE_STATS": Key(..., TRAINING, one_of(False), "not supported: no batch norm"),
}
# fmt: on
