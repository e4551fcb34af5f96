"""Every key there is: PySlowFast 1.0's tree, Motionformer's keys, and ours.

Keys of Motionformer keep its names and defaults, so that its YAML files load
unchanged. A key that is here is honoured; a value that we cannot honour is
refused by `validate`.
"""

from __future__ import annotations

from fvcore.common.config import CfgNode
from slowfast.config.defaults import get_cfg as slowfast_get_cfg

from slowfast_lara.attention import ESTIMATORS, estimator_options


def get_cfg() -> CfgNode:
    """A fresh copy of the default config."""
    cfg = slowfast_get_cfg()
    for add_keys in (_train_and_test, _model, _vit, _data, _solver, _run):
        add_keys(cfg)
    return cfg


def _train_and_test(cfg: CfgNode) -> None:
    # If True, a checkpoint given by CHECKPOINT_FILE_PATH starts at epoch 0:
    # fine-tuning. If False, it is continued from where it stood.
    cfg.TRAIN.CHECKPOINT_EPOCH_RESET = False
    # Also save within an epoch, every so many iterations (0: only at its end).
    cfg.TRAIN.CHECKPOINT_ITERATIONS = 0
    # How many checkpoints to keep, the newest ones (0: all), besides the best.
    cfg.TRAIN.CHECKPOINT_KEEP = 0
    # Also keep the checkpoint of the best validation accuracy.
    cfg.TRAIN.CHECKPOINT_BEST = False
    # Where the scores of all videos go, for ensembling ("": not saved).
    cfg.TEST.SAVE_RESULTS_PATH = ""


def _model(cfg: CfgNode) -> None:
    cfg.MODEL.MODEL_NAME = "VisionTransformer"
    cfg.MODEL.ARCH = "slow"
    # PySlowFast asks these lists how many pathways a clip has.
    cfg.MODEL.SINGLE_PATHWAY_ARCH = ["c2d", "i3d", "slow", "slowonly"]
    # Recompute each block in the backward pass: less memory, a third more time.
    cfg.MODEL.ACT_CHECKPOINT = False
    # torch.compile the model.
    cfg.MODEL.COMPILE = False


def _vit(cfg: CfgNode) -> None:
    cfg.VIT = CfgNode()
    # Patch size in space and in time (1: 2-D patches of single frames).
    cfg.VIT.PATCH_SIZE = 16
    cfg.VIT.PATCH_SIZE_TEMP = 2
    cfg.VIT.CHANNELS = 3
    cfg.VIT.EMBED_DIM = 768
    cfg.VIT.DEPTH = 12
    cfg.VIT.NUM_HEADS = 12
    cfg.VIT.MLP_RATIO = 4.0
    cfg.VIT.QKV_BIAS = True
    # False: the model takes images, [B, 3, H, W].
    cfg.VIT.VIDEO_INPUT = True
    # Frames of tokens: DATA.NUM_FRAMES / PATCH_SIZE_TEMP.
    cfg.VIT.TEMPORAL_RESOLUTION = 8
    # A hidden layer before the classifier, with activation HEAD_ACT.
    cfg.VIT.USE_MLP = False
    cfg.VIT.HEAD_ACT = "tanh"
    # Dropout of projections and MLPs; of whole residual branches (growing
    # linearly with depth); of the head; of the positions; of exact attention.
    cfg.VIT.DROP = 0.0
    cfg.VIT.DROP_PATH = 0.0
    cfg.VIT.HEAD_DROPOUT = 0.0
    cfg.VIT.POS_DROPOUT = 0.0
    cfg.VIT.ATTN_DROPOUT = 0.0
    # Start from the weights of an image model: the file PRETRAINED_WEIGHTS.
    cfg.VIT.IM_PRETRAINED = True
    cfg.VIT.PRETRAINED_WEIGHTS = "vit_1k"
    # Its 2-D patches become 3-D: "centre" of the patch's frames, or "average" of them.
    cfg.VIT.INFLATE = "centre"
    # "separate": one embedding for space and one for time; "joint": one for all.
    cfg.VIT.POS_EMBED = "separate"
    # "trajectory", "joint" or "divided" space-time attention.
    cfg.VIT.ATTN_LAYER = "trajectory"
    # True: values of the temporal stage are the pooled tokens themselves, as in
    # the published checkpoints. False: they are projected, as in the article.
    cfg.VIT.USE_ORIGINAL_TRAJ_ATTN_CODE = True
    # What replaces the softmax: "none", or a name of ESTIMATORS.
    cfg.VIT.APPROX_ATTN_TYPE = "none"
    # The number of landmarks C or of samples S.
    cfg.VIT.APPROX_ATTN_DIM = 128
    # One node for each estimator that has options: VIT.LARA.BETA, and so on.
    # Meaning and symbols are in the signature of its class.
    for name in ESTIMATORS:
        options = estimator_options(name)
        if options:
            node = {key.upper(): option.default for key, option in options.items()}
            cfg.VIT[name.upper()] = CfgNode(node)


def _data(cfg: CfgNode) -> None:
    # Between the path and the label in a list.
    cfg.DATA.PATH_LABEL_SEPARATOR = " "
    # Clips are NUM_FRAMES * SAMPLING_RATE frames of a video at this rate.
    cfg.DATA.TARGET_FPS = 30
    # Draw the short side so that its reciprocal is uniform.
    cfg.DATA.INV_UNIFORM_SAMPLE = False
    cfg.DATA.RANDOM_FLIP = True
    # BGR rather than RGB: Motionformer's SSv2 models want it.
    cfg.DATA.REVERSE_INPUT_CHANNEL = False
    cfg.DATA.COLORJITTER = False
    # Crops of random area and aspect instead of scale jitter and random crop.
    cfg.DATA.USE_RANDOM_RESIZE_CROPS = False
    cfg.DATA.USE_RAND_AUGMENT = False
    # Magnitude, number of operations, spread of the magnitude, "inc": the
    # strength of every operation grows with the magnitude.
    cfg.DATA.RAND_AUGMENT = "rand-m20-n2-mstd0.5-inc"
    # Training stops when more than this share of the videos will not decode.
    cfg.DATA.MAX_BAD_SHARE = 0.01
    # In Motionformer's files, off in all of its K400 and SSv2 ones; other
    # values are refused.
    cfg.DATA.RE_PROB = 0.0
    cfg.DATA.USE_REPEATED_AUG = False
    cfg.DATA.GRAYSCALE = False
    cfg.DATA.GAUSSIAN = False


def _solver(cfg: CfgNode) -> None:
    cfg.SOLVER.OPTIMIZING_METHOD = "adamw"
    # PySlowFast has an int here, and fractions of an epoch are usual.
    cfg.SOLVER.WARMUP_EPOCHS = 0.0
    # PySlowFast starts at 0.01, a hundred times the rates that transformers use.
    cfg.SOLVER.WARMUP_START_LR = 0.0
    # The end of the cosine.
    cfg.SOLVER.COSINE_END_LR = 0.0
    # The loss's label smoothing.
    cfg.SOLVER.SMOOTHING = 0.0
    cfg.SOLVER.USE_MIXED_PRECISION = False
    # "float16" (with a gradient scaler) or "bfloat16".
    cfg.SOLVER.PRECISION = "float16"
    # The largest norm of the gradient (None: not clipped).
    cfg.SOLVER.CLIP_GRAD = None
    # One optimiser step for so many batches.
    cfg.SOLVER.ACCUMULATE_STEPS = 1
    # If > 0, BASE_LR is meant for this total batch, and scaled to the real one.
    cfg.SOLVER.REFERENCE_BATCH = 0


def _run(cfg: CfgNode) -> None:
    cfg.TENSORBOARD = CfgNode()
    cfg.TENSORBOARD.ENABLE = False
    # "": OUTPUT_DIR/tensorboard.
    cfg.TENSORBOARD.LOG_DIR = ""
    # Let cuDNN try its algorithms; let GPUs round matrix products to TF32.
    cfg.CUDNN_BENCHMARK = False
    cfg.ALLOW_TF32 = False
    # Seconds that a process waits for the others before it gives up.
    cfg.DIST_TIMEOUT = 1800
