import sys
sys.path.insert(0, ".")
import torch
from benchmarks.attention_bwd_check import *
plain = tri_attn_bwd.variants
def patched(over):
    def f(problem):
        v = plain(problem)
        for name, d in over.items():
            v[name] = {**v[name], **d}
        return v
    return f
if len(sys.argv) > 1:
    inputs = make_inputs(1, 768, 4, 768, 32)
    gradients(inputs); torch.cuda.synchronize()
    sys.exit()
M = ("tri_attn_bwd_kv", "tri_attn_bwd_q", "tri_attn_bwd_bias")
for d in (32, 16):
    inputs = make_inputs(1, 768, 4, 768, d)
    for label, over in {"default": {}, "nosplit": {m: {"TPF_SPLIT": 0} for m in M[:2]}, "stages2": {m: {"TPF_STAGES": 2} for m in M}, "stages3": {m: {"TPF_STAGES": 3} for m in M}}.items():
        tri_attn_bwd.variants = patched(over)
        _, call = gradients(inputs)
        print(label, d, {k.replace("tri_attn_", ""): round(v, 3) for k, v in kernel_ms(call).items()}, "total %.3f" % median_ms(call), flush=True)
import time
tri_attn_bwd.variants = plain
inputs = make_inputs(1, 128, 4, 128, 32)
_, call = gradients(inputs)
for _ in range(20): call()
torch.cuda.synchronize(); t = time.perf_counter()
for _ in range(200): call()
print("host us", (time.perf_counter() - t) / 200 * 1e6); torch.cuda.synchronize()
import cProfile, pstats
pr = cProfile.Profile(); pr.enable()
for _ in range(200): call()
pr.disable(); torch.cuda.synchronize(); pstats.Stats(pr).sort_stats("tottime").print_stats(14)
