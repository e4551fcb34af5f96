"""Kernel tests in Triton's interpreter: python -m tests.helpers.interpreted CASE ...

Triton selects the interpreter when it is imported, so test_kernels.py runs this file as a program
of its own. It prints one line per case: "passed", or the error.
"""

from __future__ import annotations

import logging
import sys
import traceback
from collections.abc import Callable

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from slowfast_lara.attention import build_estimator
from slowfast_lara.attention.kernels import (
    choice,
    self_check,
    tiles,
    triton_combine,
    triton_group_attention,
    triton_group_means,
    triton_groups,
    triton_key_stats,
    triton_landmarks,
    triton_proposals,
    triton_temporal,
    verdicts,
)
from slowfast_lara.attention.kernels.combine import combine
from slowfast_lara.attention.kernels.key_stats import key_stats
from slowfast_lara.attention.kernels.landmarks import landmarks as landmarks_operator
from slowfast_lara.attention.kernels.measure import Operator, measure
from slowfast_lara.attention.kernels.merged import merged
from slowfast_lara.attention.kernels.proposals import proposals
from slowfast_lara.attention.kernels.temporal import temporal
from slowfast_lara.attention.temporal import temporal_attention
from tests.helpers import reference

# Largest difference from float64, relative to the largest element.
ALLOWED = {torch.float32: 1e-5, torch.float16: 1e-2}
CPU = torch.device("cpu")
FAST: dict[str, Callable[[], None]] = {}
SLOW: dict[str, Callable[[], None]] = {}


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def with_gradients(function: Callable[..., Tensor], inputs: list[Tensor]) -> list[Tensor]:
    given = [x.detach().requires_grad_() for x in inputs]
    out = function(*given)
    direction = normal(*out.shape, seed=9).half().to(out.dtype)
    grads = torch.autograd.grad(out, given, direction, allow_unused=True)
    return [out.detach(), *(torch.zeros_like(x) if g is None else g for g, x in zip(grads, given))]


def relative_errors(actual: list[Tensor], expected: list[Tensor]) -> list[float]:
    # Gradients of a saturated softmax underflow in half precision.
    smallest = [
        1e-12 if ours.dtype == torch.float32 else torch.finfo(ours.dtype).smallest_normal
        for ours in actual
    ]
    return [
        (ours.double() - theirs).abs().max().item() / max(theirs.abs().max().item(), least)
        for ours, theirs, least in zip(actual, expected, smallest)
    ]


def compare(
    kernel: Callable[..., Tensor], reference: Callable[..., Tensor], inputs: list[Tensor]
) -> None:
    """Compare a kernel with a float64 reference.

    Scores of large inputs have rounding errors that their exponentials amplify. So each result may
    have up to five times the error of the same reference in float32.
    """
    expected = with_gradients(reference, [x.double() for x in inputs])
    plain = relative_errors(with_gradients(reference, [x.float() for x in inputs]), expected)
    found = relative_errors(with_gradients(kernel, inputs), expected)
    for i, (ours, theirs) in enumerate(zip(found, plain)):
        allowed = max(ALLOWED[inputs[0].dtype], 5 * theirs)
        assert ours <= allowed, f"result {i}: {ours:.1e}, PyTorch {theirs:.1e}"


def estimator_case(
    name: str, sizes: tuple[int, ...], dtype: torch.dtype, factor: float = 1.0, **options: object
) -> None:
    B, h, F, P, C, d = sizes
    # Views of one tensor, as in a layer: strided and with an offset.
    whole = (normal(B, 1 + F * P, 3, h, d) * factor).to(dtype)
    qkv = [x[:, :, 1:] for x in whole.permute(2, 0, 3, 1, 4)]
    built = {
        kernels: build_estimator(
            name, head_dim=d, num_heads=h, num_landmarks=C, kernels=kernels, **options
        ).eval()
        for kernels in ("triton", "torch")
    }

    built["torch"].load_state_dict(built["triton"].state_dict())

    def kernel(*inputs: Tensor) -> Tensor:
        return built["triton"](*inputs, num_frames=F)

    def reference(*inputs: Tensor) -> Tensor:
        return built["torch"].to(inputs[0].dtype)(*inputs, num_frames=F)

    compare(kernel, reference, qkv)


def parts_case(programs: int, queries: list[int], frames: list[int]) -> None:
    """LARA with parts of given numbers of queries and frames.

    There are 5 blocks of queries, the last shorter than the others, and 5 frames.
    """
    kept, tiles.MIN_PROGRAMS = tiles.MIN_PROGRAMS, programs
    sizes = {"element_size": 4, "d": 16, "C": 6}
    for kernel in ("query_normaliser", "combine_backward_samples"):
        part = tiles.queries_of_part(kernel, 70, 2, **sizes)
        assert [len(x) for x in torch.arange(70).split(part)] == queries
    part = tiles.frames_of_part("key_stats_backward_samples", 5, 2, **sizes)
    assert [len(x) for x in torch.arange(5).split(part)] == frames
    estimator_case("lara", (1, 2, 5, 14, 6, 16), torch.float32)
    tiles.MIN_PROGRAMS = kept


def merged_case(
    sizes: tuple[int, ...], dtype: torch.dtype, rounds: int = 4, values: float = 0.7
) -> None:
    """The groups are those of the reference; outputs and gradients, given the groups.

    In half precision, rounding decides between centres at nearly the same distance.
    """
    B, h, F, P, m, d = sizes
    whole = (normal(B, 1 + F * P, 3, h, d) + 1).to(dtype)
    qkv = [x[:, :, 1:] for x in whole.permute(2, 0, 3, 1, 4)]
    chosen = merged(*qkv, F, m, rounds, values)[1]
    same = []

    def attend(q: Tensor, k: Tensor, v: Tensor, b: int, h: int, f: int) -> Tensor:
        own = chosen[b, h, f].tolist()
        inputs = (k.detach().double(), v.detach().double(), m, rounds, values)
        same.extend(a == b for a, b in zip(own, reference.merged_groups(*inputs)))
        return reference.merged_frame(q, k, v, own)

    compare(
        lambda *inputs: merged(*inputs, F, m, rounds, values)[0],
        lambda *inputs: reference.over_frames(*inputs, F, attend),
        qkv,
    )
    assert sum(same) >= (1 if dtype == torch.float32 else 0.9) * len(same), sum(same) / len(same)


def merged_equal_keys() -> None:
    """Copies of a few keys and values: the result is exact, whatever the order of the ties."""
    from slowfast_lara.attention import softmax_attention

    for dtype in (torch.float32, torch.float16):
        for distinct, m in ((5, 5), (5, 9), (1, 3)):
            index = torch.arange(2 * 15) % distinct
            q, k, v = normal(3, 1, 2, 30, 8).to(dtype)
            compare(
                lambda q, k, v, m=m: merged(q, k, v, 2, m, 4, 0.7)[0],
                lambda q, k, v: softmax_attention(q, k, v, num_frames=2),
                [q, k[:, :, index], v[:, :, index]],
            )


def merged_with_invalid_numbers() -> None:
    """NaN and infinity raise no error and stay in their frame."""
    for number in (float("nan"), float("inf")):
        q, k, v = normal(3, 1, 1, 20, 8)
        k[:, :, 3], v[:, :, 4] = number, number
        out = merged(q, k, v, 2, 5, 4, 0.7)[0]
        assert not out[:, :, :, 0].isfinite().any() and out[:, :, :, 1].isfinite().all()
        assert merged(q, k.fill_(number), v, 2, 5, 4, 0.7)[0].isnan().any()


def temporal_case(
    sizes: tuple[int, ...], dtype: torch.dtype, project: bool, bias: bool, factor: float = 1.0
) -> None:
    B, N, F, h, d = sizes
    D = h * d
    x = (normal(B, F, N, D + 3, seed=1) * factor).to(dtype)[..., :D]  # strided
    inputs = [(normal(B, N, h, d) * factor).to(dtype), x]
    inputs += [(normal(2 * D, D, seed=2) * D**-0.5).to(dtype)]
    inputs += [normal(2 * D, seed=3).to(dtype)] if bias and project else []

    def kernel(q: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return temporal_attention(q, x, weight, bias, project, "triton")

    def reference(q: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return temporal_attention(q, x, weight, bias, project, "torch")

    if len(inputs) == 4:  # the bias of the keys has no gradient: compare that of the values only
        given, only_values = inputs.pop(), torch.arange(2 * D) >= D
        inputs.append(given[only_values])

        def padded(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
            return lambda q, x, w, b: function(q, x, w, torch.cat((torch.zeros_like(b), b)))

        compare(padded(kernel), padded(reference), inputs)
        return
    compare(kernel, reference, inputs)


def add(cases: dict[str, Callable[[], None]], name: str, run: Callable[..., None], *args, **kwargs):
    assert name not in FAST and name not in SLOW, name
    cases[name] = lambda: run(*args, **kwargs)


def add_cases() -> None:
    full, half = torch.float32, torch.float16
    small = (2, 2, 3, 7, 11, 24)
    add(FAST, "lara, float32", estimator_case, "lara", small, full)
    add(FAST, "lara, float16, x 10", estimator_case, "lara", small, half, 10.0, beta=2.0)
    add(FAST, "performer, float16", estimator_case, "performer", (1, 2, 2, 9, 37, 8), half)
    add(FAST, "merged, float32", merged_case, (1, 2, 1, 13, 5, 24), full)
    add(FAST, "merged, float16", merged_case, (1, 1, 2, 11, 4, 8), half)
    add(FAST, "lara, two parts", parts_case, 4, [48, 22], [2, 2, 1])
    add(SLOW, "lara, three parts", parts_case, 6, [32, 32, 6], [1] * 5)
    add(SLOW, "lara, one part", parts_case, 2, [70], [5])
    add(SLOW, "lara, a part for each block", parts_case, 100, [16, 16, 16, 16, 6], [1] * 5)
    add(SLOW, "merged, estimator", estimator_case, "merged", (2, 2, 3, 9, 5, 16), full)
    for dtype in (full, half):
        for size in ((1, 1, 3, 37, 1, 32), (1, 1, 2, 37, 36, 64), (1, 1, 1, 70, 33, 128)):
            add(SLOW, f"merged, {size}, {dtype}", merged_case, size, dtype)
        add(SLOW, f"merged, 196 keys, {dtype}", merged_case, (1, 1, 1, 196, 96, 64), dtype)
        # Large logits: the PyTorch path is the reference, because it limits the weights.
        size = (1, 2, 2, 19, 6, 16)
        add(SLOW, f"merged, x 10, {dtype}", estimator_case, "merged", size, dtype, 10.0)
        name, size = f"merged, one round, {dtype}", (1, 2, 2, 40, 7, 16)
        add(SLOW, name, merged_case, size, dtype, rounds=1, values=0.0)
    for project in (True, False):
        values = "projected" if project else "plain"
        add(SLOW, f"temporal, {values}", temporal_case, (2, 9, 3, 2, 24), full, project, True)
        name, sizes = f"temporal, {values}, float16", (1, 19, 5, 3, 8)
        add(FAST, name, temporal_case, sizes, half, project, False)
        odd = ((1, 5, 2, 2, 128), (1, 6, 3, 1, 80), (1, 4, 2, 17, 8))
        for size in (*odd, (1, 5, 20, 2, 8), (1, 5, 33, 2, 8)):
            add(SLOW, f"temporal, {values}, {size}", temporal_case, size, full, project, True)
        for factor in (10.0, 100.0):
            for dtype in (full, half):
                name = f"temporal, {values}, x {factor}, {dtype}"
                add(SLOW, name, temporal_case, (1, 7, 4, 2, 64), dtype, project, True, factor)
    for proposal in ("local", "global", "mixed", "mixture", "single"):
        for weighting in ("balance", "coupled", "decoupled"):
            name = f"lara, {proposal}, {weighting}"
            options = {"proposal": proposal, "weighting": weighting}
            add(SLOW, name, estimator_case, "lara", (1, 2, 3, 7, 5, 16), full, **options)
    recommended = {"proposal": "global", "landmarks": "farthest", "weighting": "balance"}
    add(FAST, "lara, farthest", estimator_case, "lara", small, full, **recommended)
    add(SLOW, "lara, farthest, float16", estimator_case, "lara", small, half, 10.0, **recommended)
    coupled = {"landmarks": "farthest", "weighting": "coupled"}
    add(SLOW, "lara, farthest, coupled", estimator_case, "lara", small, half, **coupled)
    add(SLOW, "lara, nine frames", estimator_case, "lara", (1, 1, 9, 4, 7, 8), half)
    add(SLOW, "lara, C 256", estimator_case, "lara", (1, 1, 2, 130, 256, 128), half)
    add(SLOW, "lara, one landmark", estimator_case, "lara", (1, 1, 1, 40, 1, 8), full)
    for dtype in (full, half):
        for d, C, P in ((8, 3, 5), (64, 70, 37), (80, 33, 19), (128, 17, 9)):
            name = f"lara, d {d}, C {C}, {dtype}"
            add(SLOW, name, estimator_case, "lara", (1, 2, 2, P, C, d), dtype)
        for factor in (10.0, 100.0):
            name = f"lara, x {factor}, {dtype}"
            add(SLOW, name, estimator_case, "lara", (1, 2, 3, 13, 11, 16), dtype, factor)
    add(
        SLOW,
        "performer, hyperbolic",
        estimator_case,
        "performer",
        small,
        full,
        1.0,
        features="hyperbolic",
    )
    add(SLOW, "lara, learned", estimator_case, "lara", small, full, 1.0, learned=True)


def operator_inputs() -> list[tuple]:
    B, h, F, P, C, d = 1, 2, 2, 5, 4, 8
    q, k, v = (x.requires_grad_() for x in normal(3, B, h, F * P, d).unbind())
    w, landmarks = (x.requires_grad_() for x in normal(2, B, h, C, d, seed=1).unbind())
    noise = normal(B, h, C, d, seed=3).requires_grad_()
    columns = [x.requires_grad_() for x in normal(3, B, h, C, seed=2).abs().unbind()]
    log_sums, means, *_ = (x.detach().requires_grad_() for x in key_stats(w, k, v, F))
    tokens = [normal(1, 5, 2, 8).requires_grad_(), normal(1, 3, 5, 16).requires_grad_()]
    weights = [normal(32, 16).requires_grad_(), normal(32).requires_grad_()]
    return [
        (landmarks_operator, (k, C, F, False)),
        (landmarks_operator, (k, C, F, True)),
        (proposals, (w, landmarks, None)),
        (proposals, (w, landmarks, noise)),
        (key_stats, (w, k, v, F)),
        (key_stats, (w, k, None, F)),
        (combine, (q, w, log_sums, means, landmarks, *columns)),
        (combine, (q, w, log_sums, means, None, None, None, None)),
        (merged, (q, k, v, F, 3, 2, 0.7)),
        (temporal, (*tokens, *weights, True)),
        (temporal, (*tokens, weights[0], None, False)),
    ]


def operators_pass_opcheck() -> None:
    """PyTorch's check of custom operators: schema, fake tensors, autograd, tracing."""
    for operator, args in operator_inputs():
        torch.library.opcheck(operator, args)


def backward_operators_pass_opcheck() -> None:
    for operator, args in operator_inputs():
        args = [x.detach() if isinstance(x, Tensor) else x for x in args]
        out = operator(*args)
        if operator is landmarks_operator:
            given = (args[0], out[1], args[2], torch.ones_like(out[0]))
        elif operator is proposals:
            w, landmarks, noise = args
            samples, _, *columns = out
            kept = (w, landmarks, samples, *columns, noise is not None)
            given = (*kept, *(torch.ones_like(x) for x in out))
        elif operator is merged:
            given = (*args[:3], *out[1:], torch.ones_like(out[0]))
        elif operator is key_stats:
            given = (*args, *out, torch.ones_like(out[0]), torch.ones_like(out[1]))
        else:
            given = (*args, out[1], torch.ones_like(out[0]))
        backward = getattr(torch.ops.slowfast_lara, f"{operator._name}_backward")
        torch.library.opcheck(
            backward.default, given, test_utils=("test_schema", "test_faketensor")
        )


def results_are_deterministic() -> None:
    for operator, args in operator_inputs():
        given = [x for x in args if isinstance(x, Tensor)]
        runs = []
        for _ in range(2):
            out = operator(*args)[0]
            runs.append(
                [out, *torch.autograd.grad(out, given, torch.ones_like(out), allow_unused=True)]
            )
        assert all(a is b or torch.equal(a, b) for a, b in zip(*runs))


def same_draws_as_pytorch() -> None:
    """In training, a seed gives the same noise with Triton and PyTorch kernels."""
    q, k, v = normal(3, 1, 2, 12, 8)
    for options in ({}, {"proposal": "mixture"}):
        outs = []
        for kernels in ("triton", "torch"):
            torch.manual_seed(5)
            estimator = build_estimator(
                "lara", head_dim=8, num_landmarks=5, kernels=kernels, **options
            )
            outs.append(estimator.train()(q, k, v, num_frames=2))
        assert relative_errors(outs[:1], outs[1:])[0] < 1e-5


def small_model(kernels: str = "triton", **vit: object) -> torch.nn.Module:
    from slowfast_lara.config import get_cfg
    from slowfast_lara.models import MODEL_REGISTRY
    from tests.helpers.small_models import small_config

    cfg = get_cfg()
    config = small_config(**{"DEPTH": 1, "KERNELS": kernels, "APPROX_ATTN_DIM": 5, **vit})
    for node, values in config.items():
        if isinstance(values, dict):
            cfg[node].update(values)
        else:
            cfg[node] = values
    torch.manual_seed(0)
    return MODEL_REGISTRY.get(cfg.MODEL.MODEL_NAME).from_config(cfg)


MERGED = {"APPROX_ATTN_TYPE": "merged", "APPROX_ATTN_DIM": 3}


def compiled() -> None:
    for options in ({}, MERGED):
        model = small_model(**options).eval()
        clip = normal(1, 3, 4, 16, 16)
        whole = torch.compile(model, fullgraph=True, backend="aot_eager")
        assert (whole([clip]) - model([clip])).abs().max() < 1e-6
        whole.train()([clip]).sum().backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def step(model: torch.nn.Module, autocast: bool = False) -> list[Tensor]:
    """Logits and gradients of a training step with a fixed seed."""
    torch.manual_seed(3)
    with torch.autocast("cpu", torch.float16, enabled=autocast):
        out = model.train()([normal(2, 3, 4, 16, 16)])
    out.float().square().sum().backward()
    return [out, *(p.grad for p in model.parameters() if p.grad is not None)]


def autocast() -> None:
    """Under autocast the kernels run in half precision, and the gradients are float32."""
    for options in ({}, MERGED):
        both = (step(small_model(kernels, **options), True) for kernels in ("triton", "torch"))
        ours, theirs = both
        assert ours[0].dtype == torch.float16 and {x.dtype for x in ours[1:]} == {torch.float32}
        assert max(relative_errors(ours, [x.double() for x in theirs])) < 2e-2


def checkpointing() -> None:
    """Activation checkpointing gives bit-identical results."""
    for options in ({}, MERGED):
        plain, again = small_model(**options), small_model(**options)
        again.act_checkpoint = True
        results = [step(model) for model in (plain, again)]
        assert all(torch.equal(a, b) for a, b in zip(*results))


def as_rank(rank: int, store: str) -> None:
    """One of two ranks: gradients under DDP, then a choice of kernels that only rank 0 has kept."""
    from torch import distributed

    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="log %(message)s")
    distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    alone = step(small_model())
    together = step(torch.nn.parallel.DistributedDataParallel(small_model()))
    # Both ranks have the same clips.
    assert max(relative_errors(together, [x.double() for x in alone])) < 1e-5
    call = temporal_call()
    if rank == 0:
        key = {**verdicts._environment(CPU), "call": call.description()}
        verdicts._write(key, verdicts.Verdict(2.0, 1.0, 0.0))
    else:
        verdicts.measure = None
    launched = []
    original = triton_temporal.temporal_scores
    triton_temporal.temporal_scores = BrokenKernel(
        original, lambda kernel, args, options: launched.append(1) or kernel(*args, **options)
    )
    choice.decide([call], CPU, all_ranks=True)
    print("decision", *choice.DECISIONS.values(), "launches", len(launched))
    distributed.destroy_process_group()


def temporal_call() -> verdicts.Call:
    q, x = torch.empty(2, 6, 2, 8), torch.empty(2, 3, 6, 16)
    tensors = (q, x, torch.empty(32, 16), torch.empty(32))
    return verdicts.Call("temporal", {"project_values": True}, [y.half() for y in tensors])


def fake() -> None:
    with FakeTensorMode():
        model = small_model()
        out = model([torch.empty(2, 3, 4, 16, 16)])
        out.sum().backward()
        assert out.shape == (2, 6)


def meta() -> None:
    with torch.device("meta"):
        q = torch.empty(2, 2, 12, 8, dtype=torch.bfloat16, requires_grad=True)
        for name, number in (("lara", 5), ("merged", 3)):
            q.grad = None
            out = build_estimator(name, head_dim=8, num_landmarks=number, kernels="triton")(
                q, q, q, num_frames=3
            )
            out.sum().backward()
            assert out.shape == (2, 2, 12, 3, 8) and q.grad is not None


def invalid_inputs() -> None:
    """Invalid numbers of frames raise the same error with both kernels; odd values raise too."""
    q = normal(1, 2, 12, 8)
    for device in ("cpu", "meta"):
        x = q.to(device)
        for options in ({"proposal": "global"}, {"landmarks": "farthest"}):
            for frames in (0, 5):
                errors = []
                for kernels in ("triton", "torch"):
                    built = build_estimator(
                        "lara", head_dim=8, num_landmarks=4, kernels=kernels, **options
                    )
                    errors.append(error_of(built, x, x, x, num_frames=frames))
                assert errors[0] == errors[1] and "cannot be split" in errors[0], errors
        performer = build_estimator("performer", head_dim=8, num_landmarks=4, kernels="triton")
        assert "12 tokens cannot be split into 5" in error_of(performer, x, x, x, num_frames=5)
        for v in (x[:, :, :6], x[..., :4]):
            error = error_of(performer, x, x, v, num_frames=3)
            assert "does not support values with a shape different" in error, error


def error_of(function: Callable[..., Tensor], *args: Tensor, **options: int) -> str:
    try:
        function(*args, **options)
    except ValueError as error:
        return str(error)
    raise AssertionError("no error was raised")


def first_problem() -> str:
    """The first problem of the comparison in `benchmark gpu`, or an empty string."""
    for comparison in self_check.compare_operators(CPU, torch.float32, (24, 19)):
        if comparison.problem:
            return f"{comparison.operator}: {comparison.problem}"
    return ""


def self_check_passes() -> None:
    assert first_problem() == ""


class BrokenKernel:
    """A kernel whose launch is replaced by `change(kernel, args, options)`."""

    def __init__(self, kernel, change):
        self.kernel, self.change, self.arg_names = kernel, change, kernel.arg_names

    def __getitem__(self, grid):
        return lambda *args, **options: self.change(self.kernel[grid], args, options)


def self_check_detects_broken_kernels() -> None:
    """A scale that is off by 1 %, an output that stays zero, and a launch that raises."""

    def scaled_by_1_percent(kernel, args, options):
        scale = next(i for i, x in enumerate(args) if isinstance(x, float))
        kernel(*args[:scale], args[scale] * 1.01, *args[scale + 1 :], **options)

    def raising(kernel, args, options):
        raise RuntimeError("out of resource: shared memory")

    def zeros(index):
        return lambda kernel, args, options: args[index].zero_()

    def without_noise(kernel, args, options):
        kernel(*args, **{**options, "NOISE": False})

    changes = (
        (triton_proposals, "proposals_forward", without_noise, "proposals (noise)"),
        (triton_combine, "combine_backward_means", zeros(9), "combine"),
        (triton_landmarks, "farthest_of_segment", zeros(3), "landmarks (farthest)"),
        (triton_proposals, "proposals_forward", scaled_by_1_percent, "proposals"),
        (triton_key_stats, "key_stats_forward", scaled_by_1_percent, "key_stats"),
        (triton_combine, "combine_forward", scaled_by_1_percent, "combine"),
        (triton_groups, "choose_groups", zeros(3), "merged"),
        (triton_group_means, "group_means_backward", zeros(11), "merged"),
        (triton_group_attention, "attend_forward", scaled_by_1_percent, "merged"),
        (triton_temporal, "temporal_scores", raising, "temporal (projected)"),
    )
    for module, name, change, operator in changes:
        original = getattr(module, name)
        setattr(module, name, BrokenKernel(original, change))
        problem = first_problem()
        assert problem.startswith(f"{operator}: "), problem
        setattr(module, name, original)


def measurement_detects_broken_kernels() -> None:
    """An output that stays zero in the forward or backward pass, and a NaN."""
    q = normal(2, 2, 2, 6, 8).half()
    merged_options = {"num_groups": 2, "num_frames": 2, "rounds": 4, "values": 0.7}
    merged_call = verdicts.Call("merged", merged_options, [q[0], q[1], q[1]])
    for call, module, name, index, value in (
        (temporal_call(), triton_temporal, "temporal_pool", 4, 0.0),
        (temporal_call(), triton_temporal, "temporal_backward_tokens", 6, 0.0),
        (merged_call, triton_group_attention, "attend_backward_queries", 6, float("nan")),
    ):
        operator = Operator(call.description(), CPU)
        assert operator.compare(2)[1] == "" and operator.compare(1)[1] == ""
        original = getattr(module, name)
        setattr(
            module,
            name,
            BrokenKernel(original, lambda _, args, __, i=index, x=value: args[i].fill_(x)),
        )
        assert "relative error of the" in operator.compare(2)[1]
        assert "relative error of the" in measure(call.description(), CPU).problem
        setattr(module, name, original)


add_cases()
FAST |= {
    function.__name__: function for function in (same_draws_as_pytorch, fake, meta, invalid_inputs)
}
SLOW |= {
    function.__name__: function
    for function in (
        operators_pass_opcheck,
        backward_operators_pass_opcheck,
        results_are_deterministic,
        merged_equal_keys,
        merged_with_invalid_numbers,
        autocast,
        checkpointing,
        compiled,
        self_check_passes,
        self_check_detects_broken_kernels,
        measurement_detects_broken_kernels,
    )
}


def main(names: list[str]) -> None:
    torch.set_num_threads(1)
    for name in names:
        try:
            {**FAST, **SLOW}[name]()
        except Exception:
            print(f"{name}\t{traceback.format_exc()!r}", flush=True)
        else:
            print(f"{name}\tpassed", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
