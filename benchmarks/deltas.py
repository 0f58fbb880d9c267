"""Measures deltas between weight versions: their bytes, and the speed of encoding and applying them.

    python benchmarks/deltas.py --out benchmarks/results/deltas.json

The parent is 256 MiB of normally distributed weights. In the new version the given share of elements differs: in
bfloat16 by one step of rounding, in float32 by a normally distributed number of steps (standard deviation 400, as a
learning rate of 1e-6 gives). Encodings take turns:

- `used`: agentrl.versions.delta_codec: gaps and folded differences in byte planes, zstandard 1 without short matches
- `xor`: the same gaps, the XOR of the elements that differ in byte planes, zstandard 1
- `xor, level 3`: the same with zstandard 3
- `plain xor`: the XOR of all bytes, zstandard 1

Figures, by type, share of changed elements and encoding:

- `TYPE SHARE/bytes/ENCODING`: bytes of the delta, as a share of the tensor's
- `TYPE SHARE/encode/ENCODING`, `…/apply/…`: 10⁶ bytes of the tensor per second of CPU time, in one thread
- `TYPE 3%/write`, `…/make`: 10⁶ bytes per second of a delta file's `DeltaWriter`, with its digest, and of `make_whole`,
  which reads the parent's file, applies the delta, compares the digest and writes the child's file; in all threads
- `TYPE 3%/write by CPU`, `…/make by CPU`: the same per second of CPU time of all threads
- `TYPE 3%/write memory`, `…/make memory`: the most anonymous memory of the process above that before
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import harness
import numpy as np
import zstandard

from agentrl.versions.delta_codec import HEADER, apply_chunk, chunks_of, encode_chunk
from agentrl.versions.delta_writer import ChangedTensor, delta_name, joined, write_delta
from agentrl.versions.version_manifest import TensorFacts, VersionFile, VersionManifest, manifest_of
from agentrl.versions.whole_files import make_whole

ITEM_BYTES = {"bfloat16": 2, "float32": 4}
SAFETENSORS = {"bfloat16": "BF16", "float32": "F32"}
DENSITIES = (0.001, 0.01, 0.03, 0.1, 0.3)
STEPS_F32 = 400
FILE_FIGURES = ("write", "make", "write by CPU", "make by CPU", "write memory", "make memory")


class Case(NamedTuple):
    """A tensor before and after."""

    dtype: str
    parent: memoryview
    new: memoryview


class Encoding(NamedTuple):
    """A way to write what changed in a chunk, and to apply it."""

    encode: Callable[[memoryview, memoryview, int], bytes]
    apply: Callable[[bytes, memoryview, int], object]


def case(dtype: str, density: float, size_bytes: int) -> Case:
    """A tensor before and after an update that changes this share of its elements."""
    rng = np.random.default_rng(0)
    weights = rng.standard_normal(size_bytes // ITEM_BYTES[dtype], np.float32) * np.float32(0.02)
    bits: np.ndarray[Any, Any] = weights.view(np.uint32)
    if dtype == "bfloat16":
        bits = (bits >> 16).astype(np.uint16)
    new = bits.copy()
    places = np.flatnonzero(rng.random(len(bits), np.float32) < density)
    steps = rng.choice([-1, 1], len(places)) if dtype == "bfloat16" else rng.normal(0, STEPS_F32, len(places))
    new[places] = (bits[places] + np.rint(steps)).astype(np.int64).astype(bits.dtype)
    return Case(dtype, memoryview(bits).cast("B"), memoryview(new).cast("B"))


def used() -> Encoding:
    """The encoding of agentrl."""
    return Encoding(
        lambda parent, new, size: encode_chunk(parent, new, size)[0],
        lambda chunk, target, size: apply_chunk(chunk[: HEADER.size], chunk[HEADER.size :], target, size),
    )


def gaps_and_xor(level: int) -> Encoding:
    """Gaps and the XOR of the elements that differ."""

    def encode(parent: memoryview, new: memoryview, size: int) -> bytes:
        xor = np.frombuffer(parent, f"<u{size}") ^ np.frombuffer(new, f"<u{size}")
        places = np.flatnonzero(xor)
        gaps = np.diff(places, prepend=-1).astype("<u4")
        parts = [len(places).to_bytes(4, "little"), _planes(gaps), _planes(xor[places])]
        return zstandard.ZstdCompressor(level=level).compress(b"".join(parts))

    def apply(chunk: bytes, target: memoryview, size: int) -> None:
        data = zstandard.ZstdDecompressor().decompress(chunk)
        count = int.from_bytes(data[:4], "little")
        places = np.cumsum(_values(data[4 : 4 + 4 * count], 4).astype(np.int64)) - 1
        out = np.frombuffer(target, f"<u{size}")
        out[places] ^= _values(data[4 + 4 * count :], size)

    return Encoding(encode, apply)


def plain_xor() -> Encoding:
    """The XOR of all bytes."""

    def encode(parent: memoryview, new: memoryview, size: int) -> bytes:
        xor = np.frombuffer(parent, np.uint8) ^ np.frombuffer(new, np.uint8)
        return zstandard.ZstdCompressor(level=1).compress(xor.tobytes())

    def apply(chunk: bytes, target: memoryview, size: int) -> None:
        out = np.frombuffer(target, np.uint8)
        out ^= np.frombuffer(zstandard.ZstdDecompressor().decompress(chunk), np.uint8)

    return Encoding(encode, apply)


ENCODINGS = {"used": used(), "xor": gaps_and_xor(1), "xor, level 3": gaps_and_xor(3), "plain xor": plain_xor()}


class Speed(NamedTuple):
    """One measurement of an encoding."""

    share: float
    encode_mb_s: float
    apply_mb_s: float


def speed_of(encoding: Encoding, tensor: Case) -> Speed:
    """Encode and apply all chunks, in one thread, and compare the bytes."""
    size, parts = ITEM_BYTES[tensor.dtype], list(chunks_of(len(tensor.new)))
    made = memoryview(bytearray(tensor.parent))
    began = time.process_time()
    chunks = [encoding.encode(tensor.parent[part], tensor.new[part], size) for part in parts]
    encoded = time.process_time()
    for part, chunk in zip(parts, chunks, strict=True):
        encoding.apply(chunk, made[part], size)
    applied = time.process_time()
    if made != tensor.new:
        sys.exit("the delta did not make the new version")
    total = len(tensor.new)
    return Speed(sum(map(len, chunks)) / total, total / 1e6 / (encoded - began), total / 1e6 / (applied - encoded))


def compare_encodings(report: harness.Report, rounds: int, size_bytes: int) -> None:
    """All encodings, for each type and share."""
    for dtype in ITEM_BYTES:
        for density in DENSITIES:
            tensor = case(dtype, density, size_bytes)
            found: dict[str, list[Speed]] = {name: [] for name in ENCODINGS}

            def measured(name: str, tensor: Case = tensor, found: dict[str, list[Speed]] = found) -> float:
                found[name].append(speed_of(ENCODINGS[name], tensor))
                return 0.0

            harness.interleave({name: partial(measured, name) for name in ENCODINGS}, rounds, warmups=0)
            title = f"{dtype} {density:.1%}".replace(".0%", "%")
            for number, figure in enumerate(("bytes", "encode", "apply")):
                samples = {name: [float(speed[number]) for speed in speeds] for name, speeds in found.items()}
                report.compare(f"{title}/{figure}", samples, "of the tensor" if not number else "MB/s", "used")


def measure_files(report: harness.Report, rounds: int, size_bytes: int) -> None:
    """Write a delta file, and make the child's files from the parent's, at 3 %."""
    for dtype in ITEM_BYTES:
        tensor = case(dtype, 0.03, size_bytes)
        figures: dict[str, list[float]] = {name: [] for name in FILE_FIGURES}
        for _ in range(rounds):
            with tempfile.TemporaryDirectory() as folder:
                for name, value in files_round(tensor, Path(folder)).items():
                    figures[name].append(value)
        for name, samples in figures.items():
            report.add(f"{dtype} 3%/{name}", samples, "MiB" if "memory" in name else "MB/s")


def files_round(tensor: Case, folder: Path) -> dict[str, float]:
    """One delta file and one child: speeds and memory."""
    base, child = folder / "v1-a", folder / "v2-a"
    base.mkdir()
    child.mkdir()
    parent = manifest_of("v1-a", [facts(tensor, tensor.parent)], [write_parent(base, tensor)], None)
    found: dict[str, float] = {}
    with measured(found, "write", len(tensor.new)):
        changed = ChangedTensor("w", SAFETENSORS[tensor.dtype], tensor.parent, tensor.new)
        part = write_delta(folder / delta_name(0, 1), [changed])
    delta = joined("v1-a", parent.checksum, [part])
    wanted: VersionManifest = manifest_of("v2-a", [facts(tensor, tensor.new)], None, delta)
    with measured(found, "make", len(tensor.new)):
        make_whole(base, parent, wanted, [[folder / delta_name(0, 1)]], child)
    return found


def facts(tensor: Case, data: memoryview) -> TensorFacts:
    """The facts of the only tensor of a version."""
    shape = (len(data) // ITEM_BYTES[tensor.dtype],)
    return TensorFacts("w", SAFETENSORS[tensor.dtype], shape, hashlib.sha256(data).hexdigest())


def write_parent(folder: Path, tensor: Case) -> VersionFile:
    """Write the parent's safetensors file."""
    shape = [len(tensor.parent) // ITEM_BYTES[tensor.dtype]]
    entry = {"dtype": SAFETENSORS[tensor.dtype], "shape": shape, "data_offsets": [0, len(tensor.parent)]}
    header = json.dumps({"w": entry}).encode()
    path = folder / "model.safetensors"
    with path.open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.write(tensor.parent)
    return VersionFile(path.name, path.stat().st_size, "0" * 64)


@contextmanager
def measured(found: dict[str, float], name: str, size_bytes: int) -> Iterator[None]:
    """Put the block's speed and the most anonymous memory that it added into `found`."""
    ctypes.CDLL(None).malloc_trim(0)  # what was freed is not counted before
    before, ended = _anonymous_mib(), threading.Event()
    most = [before]

    def watch() -> None:
        while not ended.wait(0.005):
            most.append(_anonymous_mib())

    watcher = threading.Thread(target=watch)
    watcher.start()
    began, cpu = time.perf_counter(), time.process_time()
    yield
    found[name] = size_bytes / 1e6 / (time.perf_counter() - began)
    found[f"{name} by CPU"] = size_bytes / 1e6 / (time.process_time() - cpu)
    ended.set()
    watcher.join()
    found[f"{name} memory"] = max(most) - before


def _anonymous_mib() -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("RssAnon:"))


def _planes(values: np.ndarray[Any, Any]) -> bytes:
    return values.view(np.uint8).reshape(-1, values.dtype.itemsize).T.tobytes()


def _values(data: bytes, size: int) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(np.frombuffer(data, np.uint8).reshape(size, -1).T).reshape(-1).view(f"<u{size}")


def main() -> None:
    """Measure, print a table, write JSON."""
    options = harness.arguments(
        __doc__, rounds=(int, 3, "rounds of each encoding"), mib=(int, 256, "size of the tensor in MiB")
    )
    report = harness.Report("deltas")
    report.notes |= {"tensor_mib": options.mib, "zstandard": zstandard.__version__}
    measure_files(report, options.rounds, options.mib << 20)
    compare_encodings(report, options.rounds, options.mib << 20)
    harness.finish(report, options.out)


if __name__ == "__main__":
    main()
