"""Sizes of dtypes, by torch's names, without torch."""

from __future__ import annotations

_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "complex64": 8, "complex128": 16,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip

#: What sums over tp may run in.
SUMMED = ("bfloat16", "float16", "float32", "float64")


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of one element of ``dtype``, such as ``"bfloat16"``."""
    return _BYTES[dtype]


def summed_in(dtype: str, asked: str | None) -> str:
    """Return what a value of ``dtype`` is summed over tp in, where ``asked`` is asked for."""
    return asked if asked is not None and dtype.startswith(("float", "bfloat")) else dtype
