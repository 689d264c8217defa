"""Sizes of dtypes, by torch's names, without torch."""

from __future__ import annotations

_BYTES = {
    "float64": 8, "float32": 4, "bfloat16": 2, "float16": 2, "complex64": 8, "complex128": 16,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
}  # fmt: skip


def dtype_bytes(dtype: str) -> int:
    """Return the bytes of one element of ``dtype``, such as ``"bfloat16"``."""
    return _BYTES[dtype]
