"""Parameter structures of the attention backward's kernels."""

from __future__ import annotations

import ctypes

from tpf.kernels.tma import TensorMap


class MainParams(ctypes.Structure):
    """``Params`` of tri_attn_bwd.cuh."""

    _fields_ = [
        *((name, TensorMap) for name in ("q", "k", "v", "dout", "dq", "dk", "dv")),
        *((name, ctypes.c_void_p) for name in ("row_fold", "key_fold", "bias_s", "bias_st")),
        *((name, ctypes.c_void_p) for name in ("dbias_partial", "dq_sum", "order")),
        *((name, ctypes.c_int) for name in ("tokens", "tiles", "blocks", "heads", "outer")),
        *((name, ctypes.c_int) for name in ("batch", "groups", "jobs", "first_group")),
        ("key_fold_stride", ctypes.c_int),
        *((name, ctypes.c_float) for name in ("scale", "scale2")),
        ("padding", ctypes.c_uint32 * 6),
    ]


class RowParams(ctypes.Structure):
    """``Params`` of tri_attn_prep_rows.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("dout", "out", "residual", "lse", "row_fold")),
        ("dout_stride", ctypes.c_int64 * 4),
        ("out_stride", ctypes.c_int64 * 4),
        *((name, ctypes.c_int) for name in ("tokens", "padded", "heads", "outer", "head_dim")),
        ("slice_blocks", ctypes.c_int),
        ("scale2", ctypes.c_float),
    ]


class PairParams(ctypes.Structure):
    """``Params`` of tri_attn_prep_pair.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("bias", "mask", "bias_s", "bias_st", "key_fold")),
        ("dropped_rows", ctypes.c_void_p),
        ("bias_stride", ctypes.c_int64 * 4),
        ("mask_stride", ctypes.c_int64 * 3),
        *((name, ctypes.c_int) for name in ("tokens", "tiles", "heads", "batch")),
        *((name, ctypes.c_int) for name in ("outer", "slices")),
        ("scale2", ctypes.c_float),
    ]


class StripParams(ctypes.Structure):
    """``Params`` of tri_attn_bwd_strips.cu."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("partial", "dbias")),
        ("stride", ctypes.c_int64 * 4),
        *((name, ctypes.c_int) for name in ("tokens", "tiles", "heads")),
        *((name, ctypes.c_int) for name in ("groups", "jobs", "blocks")),
    ]
