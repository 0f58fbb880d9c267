"""Delta files: what a writer writes makes the next version, exactly; anything else is refused by the file's name."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import DamagedObject
from agentrl.versions.delta_codec import CHUNK_BYTES
from agentrl.versions.delta_reader import DeltaFile
from agentrl.versions.delta_writer import MAGIC, TRAILER, ChangedTensor, DeltaWriter, delta_name, joined, write_delta
from agentrl.versions.version_manifest import VersionFile
from tests.version_folders import Tensors, Values, changed, tensors, values


def pairs(before: Tensors, after: Tensors) -> list[ChangedTensor]:
    return [ChangedTensor(name, new.dtype, before[name].data, new.data) for name, new in after.items()]


def applied(path: Path, before: Tensors, after: Tensors) -> dict[str, bytes]:
    """The tensors of the new version, from the parent's and a file."""
    delta, made = DeltaFile(path), {}
    for name, new in after.items():
        data = bytearray(before[name].data)
        if name in delta.names:
            facts = new.facts(name)
            for at, chunk in enumerate(delta.chunks(facts)):
                start = at * CHUNK_BYTES
                delta.apply(chunk, memoryview(data)[start : start + CHUNK_BYTES], facts.item_bytes)
        made[name] = bytes(data)
    return made


def test_a_file_makes_the_next_version(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    before = tensors(rng)
    after = changed(rng, before)
    path = tmp_path / delta_name(0, 1)
    part = write_delta(path, pairs(before, after))
    assert applied(path, before, after) == {name: new.data for name, new in after.items()}
    content = path.read_bytes()
    assert part.file == VersionFile(path.name, len(content), hashlib.sha256(content).hexdigest())
    assert part.elements == sum(new.facts(name).elements for name, new in after.items())
    different = sum(
        int(np.count_nonzero(np.frombuffer(old.data, f"u{size}") != np.frombuffer(after[name].data, f"u{size}")))
        for name, old in before.items()
        for size in [old.facts(name).item_bytes]
    )
    assert part.changed == different > 0


def test_equal_tensors_are_left_out(tmp_path: Path) -> None:
    before = tensors(np.random.default_rng(0))
    part = write_delta(tmp_path / delta_name(0, 1), pairs(before, before))
    assert DeltaFile(tmp_path / delta_name(0, 1)).names == set()
    assert part.changed == 0
    assert part.file.size_bytes < 40


def test_a_tensor_of_several_chunks(tmp_path: Path) -> None:
    """Chunks before the first that differs are written too; more chunks than threads stay in order."""
    before = {"w": Values("BF16", (3 * CHUNK_BYTES,), bytes(6 * CHUNK_BYTES))}
    data = bytearray(before["w"].data)
    data[5 * CHUNK_BYTES + 7] = data[-1] = 1
    after = {"w": Values("BF16", (3 * CHUNK_BYTES,), bytes(data))}
    with DeltaWriter(tmp_path / delta_name(0, 1), threads=2) as writer:
        assert writer.add(pairs(before, after)[0]) == 2
    assert applied(tmp_path / delta_name(0, 1), before, after)["w"] == data


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.floats(0, 1), st.integers(0, 3000))
def test_any_tensors(tmp_path_factory: pytest.TempPathFactory, seed: int, density: float, elements: int) -> None:
    rng = np.random.default_rng(seed)
    before = tensors(rng, elements)
    after = changed(rng, before, density)
    path = tmp_path_factory.mktemp("delta") / delta_name(0, 1)
    write_delta(path, pairs(before, after))
    assert applied(path, before, after) == {name: new.data for name, new in after.items()}


@pytest.mark.parametrize(
    "tensor",
    [ChangedTensor("w", "BF16", b"ab", b"abcd"), ChangedTensor("w", "F99", b"ab", b"ab")],
    ids=["size", "type"],
)
def test_what_is_no_delta_is_refused(tmp_path: Path, tensor: ChangedTensor) -> None:
    with pytest.raises(ValueError, match=r"tensor 'w' is no delta of its parent"):
        write_delta(tmp_path / delta_name(0, 1), [tensor])


def test_parts_are_joined(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    before = tensors(rng)
    after = pairs(before, changed(rng, before))
    parts = [write_delta(tmp_path / delta_name(n, 2), after[n::2]) for n in (1, 0)]
    delta = joined("v1-a", "0" * 64, parts)
    assert [file.name for file in delta.files] == ["delta-00001-of-00002.bin", "delta-00002-of-00002.bin"]
    assert delta.changed == parts[0].changed + parts[1].changed
    assert delta.elements == parts[0].elements + parts[1].elements


def written(folder: Path) -> tuple[Path, Tensors, Tensors]:
    rng = np.random.default_rng(1)
    before = {"w": values(rng, "BF16", (400,)), "x": values(rng, "F32", (300,))}
    after = changed(rng, before, 0.3)
    path = folder / delta_name(0, 1)
    write_delta(path, pairs(before, after))
    return path, before, after


def test_every_truncation_is_refused_by_name(tmp_path: Path) -> None:
    path, before, after = written(tmp_path)
    content = path.read_bytes()
    for size in range(0, len(content), 7):
        path.write_bytes(content[:size])
        with pytest.raises(DamagedObject, match=delta_name(0, 1)):
            applied(path, before, after)


@settings(max_examples=150)
@given(st.data())
def test_a_changed_byte_is_refused_or_harmless_to_memory(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """The digests of the tensors find what the format does not."""
    path, before, after = written(tmp_path_factory.mktemp("delta"))
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    path.write_bytes(content)
    with suppress(DamagedObject):
        made = applied(path, before, after)
        assert {name: len(tensor) for name, tensor in made.items()} == {n: len(t.data) for n, t in after.items()}


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "not a delta file"),
        (b"x" * 100, "not a delta file"),
        (MAGIC + TRAILER.pack(2**40, MAGIC), "truncated"),
        (MAGIC + b"{}" + TRAILER.pack(2, MAGIC), "index"),
        (MAGIC + b"[" * 100_000 + TRAILER.pack(100_000, MAGIC), "index"),
        (MAGIC + b'[["w","F32",4,8],["w","F32",4,8]]' + TRAILER.pack(33, MAGIC), "twice"),
    ],
    ids=["empty", "junk", "far", "object", "deep", "twice"],
)
def test_garbage_is_refused_by_name(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / delta_name(0, 1)
    path.write_bytes(content)
    with pytest.raises(DamagedObject, match=f"{delta_name(0, 1)} is damaged: .*{says}"):
        DeltaFile(path)


def test_a_tensor_of_another_size_is_refused(tmp_path: Path) -> None:
    path, _, after = written(tmp_path)
    with pytest.raises(DamagedObject, match="another type or size"):
        list(DeltaFile(path).chunks(Values("BF16", (1 << 40,), b"").facts("w")))
    with pytest.raises(DamagedObject, match="another type or size"):
        list(DeltaFile(path).chunks(Values("F16", (400,), after["w"].data).facts("w")))


def test_a_writer_that_fails_leaves_no_complete_file(tmp_path: Path) -> None:
    path = tmp_path / delta_name(0, 1)
    with suppress(RuntimeError), DeltaWriter(path) as writer:
        writer.add(ChangedTensor("w", "BF16", b"ab", b"cd"))
        raise RuntimeError
    with pytest.raises(DamagedObject):
        DeltaFile(path)
