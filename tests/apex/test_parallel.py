"""tritonamp.apex.parallel but LARC: what maps to torch's own."""

import copy
import os
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest
import torch
from torch import nn

import tritonamp
from tritonamp.apex.parallel import SyncBatchNorm, convert_syncbn_model

U32 = torch.finfo(torch.float32).eps


def test_convert_syncbn_model() -> None:
    net = nn.Sequential(
        nn.Conv2d(3, 4, 1),
        nn.BatchNorm2d(4),
        nn.ModuleList([nn.BatchNorm1d(4)]),
        nn.InstanceNorm2d(4),
    )
    converted = convert_syncbn_model(copy.deepcopy(net), channel_last=True)
    kinds = [type(m) for m in converted.modules() if isinstance(m, nn.modules.batchnorm._NormBase)]
    assert kinds == [SyncBatchNorm, SyncBatchNorm, nn.InstanceNorm2d]
    assert converted[1].channel_last and list(converted.state_dict()) == list(net.state_dict())
    assert type(convert_syncbn_model(nn.BatchNorm2d(2))) is SyncBatchNorm


@pytest.mark.parametrize("training", [True, False])
def test_syncbn_alone_is_batch_norm(training: bool) -> None:
    norm, plain = SyncBatchNorm(3, channel_last=True, fuse_relu=True), nn.BatchNorm2d(3)
    x, z = torch.randn(4, 5, 6, 3), torch.randn(4, 5, 6, 3)
    norm.train(training), plain.train(training)
    expected = torch.relu(plain(x.movedim(-1, 1)).movedim(1, -1) + z)
    torch.testing.assert_close(norm(x, z), expected, rtol=8 * U32, atol=8 * U32)
    torch.testing.assert_close(norm.running_var, plain.running_var)


TWO_RANKS = """
import sys
import torch
import torch.distributed as dist
from torch import nn
from tritonamp.apex.parallel import DistributedDataParallel as DDP
from tritonamp.apex.parallel import Reducer, create_syncbn_process_group
from tritonamp.apex.parallel.distributed import flat_dist_call

store, rank = sys.argv[1], int(sys.argv[2])
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

def grads(dtype=torch.float32, unused=False, **arguments):
    torch.manual_seed(rank)
    a, b = nn.Linear(2, 1, bias=False, dtype=dtype), nn.Linear(2, 1, dtype=dtype)
    parts = nn.ModuleDict({"a": a, "b": b})
    parts.forward = lambda x: parts["a"](x) if unused else parts["a"](x) + parts["b"](x)
    net = DDP(parts, **arguments)
    assert torch.equal(*both(net.module["a"].weight.detach().float()))  # those of rank 0
    net(torch.full((1, 2), 1.0 + 2 * rank, dtype=dtype)).sum().backward()
    return net.module["a"].weight.grad

def both(tensor):
    result = [torch.zeros_like(tensor) for _ in range(2)]
    dist.all_gather(result, tensor.contiguous())
    return result

assert grads().tolist() == [[2.0, 2.0]]  # of 1 and 3
assert grads(message_size=1, gradient_predivide_factor=2.0).tolist() == [[2.0, 2.0]]
assert grads(gradient_average=False).tolist() == [[4.0, 4.0]]
assert grads(delay_allreduce=True, unused=True).tolist() == [[2.0, 2.0]]
half = grads(torch.float16, allreduce_always_fp32=True)
assert half.dtype is torch.float16 and half.tolist() == [[2.0, 2.0]]

net = DDP(nn.Linear(2, 1, bias=False))
net.disable_allreduce()
net(torch.full((1, 2), 1.0 + 2 * rank)).sum().backward()
assert net.module.weight.grad.tolist() == [[1.0 + 2 * rank] * 2]
net.enable_allreduce()
net(torch.full((1, 2), 1.0 + 2 * rank)).sum().backward()
assert net.module.weight.grad.tolist() == [[4.0, 4.0]]

torch.manual_seed(rank)
net = nn.Linear(2, 1)
reducer = Reducer(net)
assert torch.equal(*both(net.weight.detach()))
net.weight.grad = torch.full((1, 2), 1.0 + 2 * rank)
reducer.reduce()
assert net.weight.grad.tolist() == [[2.0, 2.0]]
values = [torch.full((2, 2), float(rank)), [torch.full((3,), 2.0 * rank).half()]]
Reducer(values).reduce()
assert values[0].tolist() == [[0.5, 0.5]] * 2 and values[1][0].tolist() == [1.0] * 3

values = [net.weight, torch.full((3,), 7 + rank), torch.full((2, 2), float(rank)).t()]
flat_dist_call(values, dist.broadcast, (1,))
assert values[1].tolist() == [8] * 3 and values[2].tolist() == [[1.0, 1.0]] * 2
assert torch.equal(*both(net.weight.detach()))
flat_dist_call(values[2:], dist.all_reduce)
assert values[2].tolist() == [[1.0, 1.0]] * 2

assert create_syncbn_process_group(0) is None
assert dist.get_world_size(create_syncbn_process_group(1)) == 1
try:
    DDP(net, delay_allreduce=True, num_allreduce_streams=2)
except ValueError as error:
    assert "drop one" in str(error)
dist.destroy_process_group()
print("done")
"""


@pytest.mark.ranks
def test_two_ranks(tmp_path: Path) -> None:
    root = str(Path(tritonamp.__file__).parent.parent)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
    }
    environment["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, "-W", "error", "-c", TWO_RANKS, str(tmp_path / "store")]
    ranks = [
        subprocess.Popen(
            [*command, rank], cwd=tmp_path, env=environment, stdout=PIPE, stderr=STDOUT, text=True
        )
        for rank in "01"
    ]
    try:
        outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(output.endswith("done\n") for output in outputs), "\n".join(outputs)
