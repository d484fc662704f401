import sys, time, yaml, torch

sys.path.insert(0, "tests/model")
import tpf.config as C


def load(name, overrides=()):
    d = yaml.safe_load(open(f"configs/{name}.yaml"))
    return C.Config(model=C.ModelConfig(**d.get("model", {})))


C.load = load
import pytest

print(torch.__version__)
pytest.main(["-q", "-p", "no:cacheprovider", "tests/model/test_model_gpu.py", "-x", "--tb=short"])
from features import random_features, unzero
from tpf.model.model import Model
from tpf.model.diffusion import Trunk

torch.manual_seed(0)

N, S = 384, 48
m = Model(C.ModelConfig(pairformer_blocks=1, impl="torch")).cuda()
f = {k: v.cuda() for k, v in random_features(n_tokens=N, n_rows=256).items()}
A = f["atom_mask"].shape[1]
tr = Trunk(
    *(
        torch.randn(1, *s, device="cuda", requires_grad=True)
        for s in ((N, 449), (N, 384), (N, N, 128))
    )
)
x = torch.randn(1, S, A, 3, device="cuda")
t = torch.rand(1, S, device="cuda")


def go(tag):
    for _ in range(2):
        torch.cuda.synchronize()
        s = time.perf_counter()
        y = m.denoise(f, tr, x, t)
        torch.cuda.synchronize()
        e = time.perf_counter()
        y.square().mean().backward()
        torch.cuda.synchronize()
        print(tag, e - s, time.perf_counter() - e)


go("fp32")
torch.set_float32_matmul_precision("high")
go("tf32")
torch.set_float32_matmul_precision("highest")
with torch.no_grad():
    with torch.profiler.profile() as p:
        m.rollout(f, tr, 1, 4)
        torch.cuda.synchronize()
print(
    sum(e.count for e in p.key_averages() if "aunchKernel" in e.key),
    [
        (e.key[:40], e.count, e.self_cpu_time_total)
        for e in sorted(p.key_averages(), key=lambda e: -e.self_cpu_time_total)[:14]
    ],
)
