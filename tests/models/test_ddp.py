"""DDP on two ranks: gradients are views of the buckets, and buffers are not broadcast."""

from __future__ import annotations

from tests.helpers.runs import finish, start

SCRIPT = """
import sys
import torch
import torch.distributed as dist
from slowfast_lara.config import load_config
from slowfast_lara.models import build_model

rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
model = build_model(load_config("quick/performer", ["VIT.DEPTH", 2])).train()
buffers = [x for name, x in model.named_buffers() if name.endswith("projection")]
for buffer in buffers:
    buffer.fill_(rank)
torch.manual_seed(rank)  # different clips on the ranks
clips = torch.randn(2, 2, 3, 8, 64, 64)
with model.no_sync():  # accumulated, as with SOLVER.ACCUMULATE_STEPS 2
    model([clips[0]]).square().sum().backward()
model([clips[1]]).square().sum().backward()
gradients = [p.grad for p in model.parameters() if p.grad is not None]
total = torch.stack([x.double().norm() for x in gradients]).norm()
storages = {x.untyped_storage().data_ptr() for x in gradients}
kept = all((x == rank).all() for x in buffers)
print(len(buffers), kept, len(gradients), len(storages), total.item())
dist.destroy_process_group()
"""


def test_gradients_and_buffers(tmp_path):
    ranks = [start(i, tmp_path / "store", program=("-c", SCRIPT)) for i in range(2)]
    results = [finish(rank) for rank in ranks]
    assert [code for code, _, _ in results] == [0, 0], results
    lines = [stdout.split() for _, stdout, _ in results]
    for buffers, kept, gradients, storages, norm in lines:
        assert int(buffers) == 2 and kept == "True"
        assert int(storages) < int(gradients) / 4  # not one for each gradient
        assert float(norm) > 0
    assert lines[0][4] == lines[1][4]
