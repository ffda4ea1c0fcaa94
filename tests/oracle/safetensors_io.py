"""Reading and writing safetensors files with the standard library and numpy only.

The fixtures must not depend on the package whose format the C++ reader re-implements. Output is canonical: tensors
in name order, header keys in a fixed order, header padded to 8 bytes, so equal tensors give equal files.
"""
import json
import struct

import numpy as np


def bf16_bits(values):
    """Round float32 values to bfloat16, nearest even; returns uint16 bit patterns (finite inputs only)."""
    bits = np.ascontiguousarray(values, dtype="<f4").view("<u4").astype(np.uint64)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")


def bf16_values(bits):
    return (np.asarray(bits, dtype=np.uint32) << 16).astype("<u4").view("<f4")


def save(path, tensors, bf16=lambda name: False):
    """tensors: {name: array}; stored as F32, or as BF16 where bf16(name) holds."""
    header, blobs, offset = {}, [], 0
    for name in sorted(tensors):
        value = np.ascontiguousarray(tensors[name], dtype="<f4")
        data = (bf16_bits(value) if bf16(name) else value).tobytes()
        header[name] = {
            "dtype": "BF16" if bf16(name) else "F32",
            "shape": list(np.shape(tensors[name])),
            "data_offsets": [offset, offset + len(data)],
        }
        offset += len(data)
        blobs.append(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def load(path):
    """Returns {name: float32 array}."""
    with open(path, "rb") as file:
        data = file.read()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8 : 8 + length])
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + x for x in entry["data_offsets"])
        if entry["dtype"] == "F32":
            value = np.frombuffer(data[begin:end], "<f4")
        elif entry["dtype"] == "BF16":
            value = bf16_values(np.frombuffer(data[begin:end], "<u2"))
        else:
            raise ValueError(f"{path}: tensor {name} has dtype {entry['dtype']}; expected F32 or BF16")
        tensors[name] = value.reshape(entry["shape"])
    return tensors
