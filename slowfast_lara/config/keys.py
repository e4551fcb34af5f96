"""Every config key that is used here: its default, what it means, what it allows.

Keys of Motionformer keep its names and defaults, so that its YAML files load
unchanged. Keys of PySlowFast 1.0 that are not in this table are in the config tree,
since its files may set them, and do nothing. docs/config.md is made of this table.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

from slowfast_lara.attention import ESTIMATORS, estimator_options
from slowfast_lara.attention.kernels.choice import KERNELS
from slowfast_lara.models.motionformer import ACTIVATIONS
from slowfast_lara.models.space_time import ATTENTION_LAYERS
from slowfast_lara.models.weights.pretrained import INFLATIONS

# A default that PySlowFast's tree has already.
PYSLOWFAST = object()


class Key(NamedTuple):
    default: Any
    meaning: str
    choices: Collection[Any] = ()
    words: Collection[str] = ()  # what may stand in place of a number


def all_keys() -> dict[str, Key]:
    """KEYS, with what the registered estimators add: their names, and VIT.<NAME>.<OPTION>."""
    kind = "VIT.APPROX_ATTN_TYPE"
    names = {kind: KEYS[kind]._replace(choices=["none", *ESTIMATORS])}
    options = {
        f"VIT.{name}.{key}".upper(): Key(
            option.default, option.meaning, option.choices, option.words
        )
        for name in ESTIMATORS
        for key, option in estimator_options(name).items()
    }
    return {**KEYS, **names, **options}


KEYS = {
    "TRAIN.ENABLE": Key(PYSLOWFAST, "train"),
    "TRAIN.DATASET": Key(PYSLOWFAST, "the kind of dataset; upper and lower case are alike"),
    "TRAIN.BATCH_SIZE": Key(
        PYSLOWFAST,
        "clips of a batch on one machine, all of its GPUs together; times NUM_SHARDS it is the "
        "batch of all machines",
    ),
    "TRAIN.EVAL_PERIOD": Key(PYSLOWFAST, "validate after every so many epochs"),
    "TRAIN.CHECKPOINT_PERIOD": Key(PYSLOWFAST, "save after every so many epochs"),
    "TRAIN.AUTO_RESUME": Key(
        PYSLOWFAST, "go on from the newest readable checkpoint in OUTPUT_DIR, if there is one"
    ),
    "TRAIN.ACCEPT_CHANGES": Key(
        False,
        "go on from a checkpoint though keys that change its numbers, or the training list, are "
        "not those it was trained with: the new ones count; False: such a run is refused",
    ),
    "TRAIN.CHECKPOINT_FILE_PATH": Key(PYSLOWFAST, "a video model to start from"),
    "TRAIN.CHECKPOINT_EPOCH_RESET": Key(
        False,
        "True: a checkpoint given by CHECKPOINT_FILE_PATH starts at epoch 0 (fine-tuning); "
        "False: it is continued from where it stood",
    ),
    "TRAIN.CHECKPOINT_ITERATIONS": Key(
        0, "also save within an epoch, every so many iterations (0: only at its end)"
    ),
    "TRAIN.CHECKPOINT_KEEP": Key(
        0, "how many checkpoints to keep, the newest ones (0: all), besides the best"
    ),
    "TRAIN.CHECKPOINT_BEST": Key(False, "also keep the checkpoint of the best validation accuracy"),
    "TRAIN.CHECKPOINT_TYPE": Key(PYSLOWFAST, "the form of checkpoints", ["pytorch"]),
    "TRAIN.CHECKPOINT_INFLATE": Key(
        PYSLOWFAST, "PySlowFast's inflation; ours is VIT.INFLATE", [False]
    ),
    "TEST.ENABLE": Key(PYSLOWFAST, "test, after training if that is enabled too"),
    "TEST.DATASET": Key(PYSLOWFAST, "as TRAIN.DATASET, for the test"),
    "TEST.BATCH_SIZE": Key(PYSLOWFAST, "views in the model at a time, on all GPUs of a machine"),
    "TEST.CHECKPOINT_FILE_PATH": Key(
        PYSLOWFAST, "the model to test (default: the newest of OUTPUT_DIR)"
    ),
    "TEST.CHECKPOINT_TYPE": Key(PYSLOWFAST, "the form of checkpoints", ["pytorch"]),
    "TEST.NUM_ENSEMBLE_VIEWS": Key(PYSLOWFAST, "clips of a video, spread over its length"),
    "TEST.NUM_SPATIAL_CROPS": Key(
        PYSLOWFAST, "crops of a clip: the centre, or three along the longer side", [1, 3]
    ),
    "TEST.USE_EMA": Key(
        True, "test and use the moving average of the weights, where a checkpoint has one"
    ),
    "TEST.SAVE_RESULTS_PATH": Key(
        "", "where in OUTPUT_DIR the scores of all videos go, as .npz (empty: not saved)"
    ),
    "MODEL.MODEL_NAME": Key("VisionTransformer", "the model's class", ["VisionTransformer"]),
    "MODEL.ARCH": Key("slow", "any of MODEL.SINGLE_PATHWAY_ARCH; it changes nothing"),
    "MODEL.SINGLE_PATHWAY_ARCH": Key(
        ["c2d", "i3d", "slow", "slowonly"],
        "PySlowFast's names of models with one pathway: what MODEL.ARCH may be",
    ),
    "MODEL.NUM_CLASSES": Key(PYSLOWFAST, "the number of classes"),
    "MODEL.LOSS_FUNC": Key(PYSLOWFAST, "the loss", ["cross_entropy"]),
    "MODEL.ACT_CHECKPOINT": Key(
        False, "recompute each block in the backward pass: less memory, a third more time"
    ),
    "MODEL.COMPILE": Key(False, "torch.compile the model"),
    "VIT.PATCH_SIZE": Key(16, "height and width of a patch, in pixels"),
    "VIT.PATCH_SIZE_TEMP": Key(2, "frames of a patch (1: 2-D patches of single frames)"),
    "VIT.CHANNELS": Key(3, "colours of a pixel"),
    "VIT.EMBED_DIM": Key(768, "D, the width of a token"),
    "VIT.DEPTH": Key(12, "blocks"),
    "VIT.NUM_HEADS": Key(12, "h, attention heads"),
    "VIT.MLP_RATIO": Key(4.0, "width of the MLPs' hidden layer, in widths of a token"),
    "VIT.QKV_BIAS": Key(True, "biases in the projections to queries, keys and values"),
    "VIT.VIDEO_INPUT": Key(True, "False: the model takes images, [B, 3, H, W]"),
    "VIT.TEMPORAL_RESOLUTION": Key(8, "F, frames of tokens: DATA.NUM_FRAMES / VIT.PATCH_SIZE_TEMP"),
    "VIT.USE_MLP": Key(False, "a hidden layer before the classifier, with activation HEAD_ACT"),
    "VIT.HEAD_ACT": Key("tanh", "activation of that layer", ACTIVATIONS),
    "VIT.DROP": Key(0.0, "dropout of projections and MLPs"),
    "VIT.DROP_PATH": Key(
        0.0, "dropout of whole residual branches in the last block; it grows linearly with depth"
    ),
    "VIT.HEAD_DROPOUT": Key(0.0, "dropout before the classifier"),
    "VIT.POS_DROPOUT": Key(0.0, "dropout after the positions are added"),
    "VIT.ATTN_DROPOUT": Key(0.0, "dropout of attention weights; only exact attention has it"),
    "VIT.IM_PRETRAINED": Key(
        True, "start from the weights of an image model, the file PRETRAINED_WEIGHTS"
    ),
    "VIT.PRETRAINED_WEIGHTS": Key("vit_1k", "that file (configs/README.md says where to get one)"),
    "VIT.INFLATE": Key(
        "centre",
        "how its 2-D patches become 3-D: in the centre one of the patch's frames, or as an "
        "average over them",
        INFLATIONS,
    ),
    "VIT.POS_EMBED": Key(
        "separate",
        "one embedding for space and one for time, or one for all",
        ["separate", "joint"],
    ),
    "VIT.ATTN_LAYER": Key("trajectory", "the kind of space-time attention", ATTENTION_LAYERS),
    "VIT.USE_ORIGINAL_TRAJ_ATTN_CODE": Key(
        True,
        "True: values of the temporal stage are the pooled tokens themselves, as in the "
        "published checkpoints; False: they are projected, as in the article",
    ),
    "VIT.APPROX_ATTN_TYPE": Key(
        "none", "what replaces the softmax: the name of an estimator, or none (exact attention)"
    ),
    "VIT.APPROX_ATTN_DIM": Key(128, "the number of landmarks C or of samples S"),
    "VIT.KERNELS": Key(
        "auto",
        "what computes LARA, Performer and the temporal stage of trajectory attention: PyTorch's "
        "operations (torch) or fused kernels (triton); auto takes these on NVIDIA GPUs of compute "
        "capability 8.0 or more, if they give there what PyTorch gives",
        KERNELS,
    ),
    "DATA.PATH_TO_DATA_DIR": Key(PYSLOWFAST, "the folder of the lists"),
    "DATA.PATH_PREFIX": Key(
        PYSLOWFAST,
        "what relative paths of a list are below (empty: the working directory, or else the "
        "list's folder)",
    ),
    "DATA.PATH_LABEL_SEPARATOR": Key(" ", "between the path and the label in a list"),
    "DATA.NUM_FRAMES": Key(PYSLOWFAST, "frames of a clip"),
    "DATA.SAMPLING_RATE": Key(
        PYSLOWFAST, "from one frame of a clip to the next, in frames of the video"
    ),
    "DATA.TARGET_FPS": Key(
        30, "clips span NUM_FRAMES * SAMPLING_RATE frames of a video at this rate"
    ),
    "DATA.MEAN": Key(PYSLOWFAST, "subtracted from pixels in [0, 1], one number for each channel"),
    "DATA.STD": Key(PYSLOWFAST, "what they are divided by then"),
    "DATA.REVERSE_INPUT_CHANNEL": Key(
        False, "BGR rather than RGB: Motionformer's SSv2 models want it"
    ),
    "DATA.TRAIN_JITTER_SCALES": Key(
        PYSLOWFAST, "smallest and largest short side to which training clips are scaled"
    ),
    "DATA.INV_UNIFORM_SAMPLE": Key(False, "draw the short side so that its reciprocal is uniform"),
    "DATA.TRAIN_CROP_SIZE": Key(PYSLOWFAST, "height and width of training and validation clips"),
    "DATA.TEST_CROP_SIZE": Key(PYSLOWFAST, "height and width of test clips"),
    "DATA.USE_RANDOM_RESIZE_CROPS": Key(
        False, "crops of random area and aspect instead of scale jitter and random crop"
    ),
    "DATA.RANDOM_FLIP": Key(True, "mirror half of the training clips, where the dataset allows it"),
    "DATA.COLORJITTER": Key(
        False, "brightness, contrast and saturation of training clips, by up to 40 %"
    ),
    "DATA.USE_RAND_AUGMENT": Key(False, "RandAugment on training clips"),
    "DATA.RAND_AUGMENT": Key(
        "rand-m20-n2-mstd0.5-inc",
        "its magnitude m, number of operations n, spread of the magnitude mstd; inc: the "
        "strength of every operation grows with the magnitude",
    ),
    "DATA.MAX_BAD_SHARE": Key(
        0.01, "training stops when more than this share of the videos will not decode"
    ),
    "DATA.GRAYSCALE": Key(False, "a fifth of the training clips in grey"),
    "DATA.GAUSSIAN": Key(
        False, "half of the training clips blurred, by a Gaussian of 0.1 to 2 pixels"
    ),
    "DATA.RE_PROB": Key(
        0.0,
        "random erasing: this share of the training clips has a rectangle of random pixels, the "
        "same place in all frames",
    ),
    "DATA.USE_REPEATED_AUG": Key(
        False,
        "repeated augmentation: every video of an epoch comes three times in a row, each time as "
        "another clip; an epoch has as many clips as before, so a third of the videos",
    ),
    "MIXUP.ENABLE": Key(
        False,
        "mix each training clip with another of its batch; accuracies in training count the "
        "label that has the larger part of a clip",
    ),
    "MIXUP.ALPHA": Key(
        0.8, "mixup: a clip's own part in a sum of both is drawn from Beta(ALPHA, ALPHA) (0: none)"
    ),
    "MIXUP.CUTMIX_ALPHA": Key(
        1.0, "cutmix: the part outside of a rectangle of the other clip is drawn likewise (0: none)"
    ),
    "MIXUP.PROB": Key(1.0, "the share of batches that are mixed"),
    "MIXUP.SWITCH_PROB": Key(0.5, "the share of these with cutmix, where there are both"),
    "SOLVER.OPTIMIZING_METHOD": Key("adamw", "the optimiser", ["sgd", "adam", "adamw"]),
    "SOLVER.BASE_LR": Key(PYSLOWFAST, "the learning rate after the warm-up"),
    "SOLVER.REFERENCE_BATCH": Key(
        0, "if > 0, BASE_LR is meant for this total batch, and scaled to the real one"
    ),
    "SOLVER.LR_POLICY": Key(
        PYSLOWFAST,
        "how the rate falls: along a cosine, or in steps",
        ["cosine", "steps_with_relative_lrs"],
    ),
    "SOLVER.STEPS": Key(PYSLOWFAST, "epochs at which the steps begin, from 0 on"),
    "SOLVER.LRS": Key(PYSLOWFAST, "the factor of BASE_LR in each step"),
    "SOLVER.COSINE_END_LR": Key(0.0, "the end of the cosine"),
    "SOLVER.MAX_EPOCH": Key(PYSLOWFAST, "epochs of training"),
    "SOLVER.WARMUP_EPOCHS": Key(
        0.0, "epochs in which the rate rises linearly from WARMUP_START_LR; fractions are allowed"
    ),
    "SOLVER.WARMUP_START_LR": Key(0.0, "the first learning rate, if there is a warm-up"),
    "SOLVER.MOMENTUM": Key(PYSLOWFAST, "momentum of sgd"),
    "SOLVER.DAMPENING": Key(PYSLOWFAST, "dampening of sgd's momentum"),
    "SOLVER.NESTEROV": Key(PYSLOWFAST, "Nesterov's momentum for sgd"),
    "SOLVER.WEIGHT_DECAY": Key(
        PYSLOWFAST, "weight decay; biases, norms, positions and the class token are spared"
    ),
    "SOLVER.SMOOTHING": Key(0.0, "label smoothing of the loss, of mixed labels too"),
    "SOLVER.LAYER_DECAY": Key(
        1.0,
        "the learning rate of each block, in rates of the block after it; the classifier and what "
        "comes after the blocks have the whole rate, the embeddings the lowest",
    ),
    "SOLVER.EMA_DECAY": Key(
        0.0,
        "keep an exponential moving average of the weights, in which each step leaves this much "
        "of the average before, or (1 + n) / (10 + n) after n steps where that is less (0: none)",
    ),
    "SOLVER.CLIP_GRAD": Key(None, "the largest norm of the gradient (None: not clipped)"),
    "SOLVER.ACCUMULATE_STEPS": Key(1, "one optimiser step for so many batches"),
    "SOLVER.USE_MIXED_PRECISION": Key(False, "compute in SOLVER.PRECISION where that is safe"),
    "SOLVER.PRECISION": Key(
        "float16", "float16 comes with a gradient scaler", ["float16", "bfloat16"]
    ),
    "DATA_LOADER.NUM_WORKERS": Key(
        PYSLOWFAST, "processes that read videos, for each training process"
    ),
    "DATA_LOADER.PIN_MEMORY": Key(PYSLOWFAST, "load into memory from which GPUs copy faster"),
    "DATA_LOADER.ENABLE_MULTI_THREAD_DECODE": Key(
        PYSLOWFAST, "decode each video with several threads"
    ),
    "NUM_GPUS": Key(PYSLOWFAST, "GPUs of each machine (0: the CPU)"),
    "DEVICE": Key(
        "auto",
        "where the model computes: on NUM_GPUS GPUs of NVIDIA, or on the CPU (auto), or on the GPU "
        "of an Apple computer (mps), with NUM_GPUS 0",
        ["auto", "mps"],
    ),
    "NUM_SHARDS": Key(PYSLOWFAST, "machines"),
    "SHARD_ID": Key(PYSLOWFAST, "the number of this machine, from 0"),
    "DIST_BACKEND": Key(PYSLOWFAST, "how tensors on GPUs are exchanged"),
    "DIST_TIMEOUT": Key(1800, "seconds that a process waits for the others before it gives up"),
    "CUDNN_BENCHMARK": Key(False, "let cuDNN try its algorithms and take the fastest"),
    "ALLOW_TF32": Key(False, "let GPUs round matrix products to TF32"),
    "RNG_SEED": Key(PYSLOWFAST, "the seed of all that is random"),
    "OUTPUT_DIR": Key(PYSLOWFAST, "the folder of the run"),
    "LOG_PERIOD": Key(PYSLOWFAST, "iterations from one line of the log to the next"),
    "TENSORBOARD.ENABLE": Key(False, "write logs for TensorBoard"),
    "TENSORBOARD.LOG_DIR": Key("", "where to (empty: OUTPUT_DIR/tensorboard)"),
    "DETECTION.ENABLE": Key(PYSLOWFAST, "PySlowFast's detection", [False]),
    "BN.USE_PRECISE_STATS": Key(
        PYSLOWFAST, "PySlowFast's batch norm statistics; there is no batch norm here", [False]
    ),
}
