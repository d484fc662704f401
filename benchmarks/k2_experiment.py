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
for d in (32, 16):
    inputs = make_inputs(1, 768, 4, 768, d)
    for label, over in {"nosplit": {"tri_attn_bwd_kv": {"TPF_SPLIT": 0}, "tri_attn_bwd_q": {"TPF_SPLIT": 0}}}.items():
        tri_attn_bwd.variants = patched(over)
        _, call = gradients(inputs)
        print(label, d, {k.replace("tri_attn_", ""): round(v, 3) for k, v in kernel_ms(call).items()}, "total %.3f" % median_ms(call), flush=True)
