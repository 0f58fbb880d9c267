"""Versions one after another: which have all tensors, which have a delta, and what a failure leaves behind."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from folders import save_kind
from layouts import save
from rank_failures import no_space
from ranks import run_ranks
from version_setup import version, writer

from agentrl.errors import StoreError
from agentrl.files import remove_drafts
from agentrl.trainer.distributed import World
from agentrl.trainer.models.policy import Policy
from agentrl.trainer.models.sharding import load_sharded
from agentrl.trainer.weights.published import Published
from agentrl.trainer.weights.version_writer import VersionWriter, pump
from agentrl.versions.version_cache import VersionCache
from agentrl.versions.version_manifest import manifest_in
from agentrl.versions.version_sources import FolderSource
from agentrl.versions.weights_folder import TENSORS, checksum

BF16 = torch.bfloat16


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_kind("qwen2-tied", tmp_path_factory.mktemp("base"))


@pytest.fixture
def policy(base: Path, world: World) -> Policy:
    return load_sharded(Policy, base, world.mesh)


class Versions:
    """Version after version of a policy that moves a little."""

    def __init__(self, policy: Policy, base: Path, world: World, root: Path, **settings: Any) -> None:
        self.writer: VersionWriter = writer(policy, base, world, dtype=BF16, **settings)
        self._policy, self._root, self._number = policy, root, 0

    @torch.no_grad()
    def next(self, *, prepares: bool = True, moved: float = 1e-5) -> Published:
        for _, p in self._policy.trainable():
            p.add_(torch.randn_like(p), alpha=moved)
        self._number += 1
        return self.write(prepares=prepares)

    def write(self, *, prepares: bool = True) -> Published:
        folder = self._root / f"v{self._number}-s{self._number}"
        return self.writer.write(folder, dict(self._policy.trainable()), lambda: prepares)


@pytest.fixture
def versions(policy: Policy, base: Path, world: World, tmp_path: Path) -> Versions:
    return Versions(policy, base, world, tmp_path / "weights", anchor_every=3)


def kinds(made: Published) -> tuple[bool, str | None]:
    """Has all tensors; the parent of its delta."""
    manifest = manifest_in(made.path)
    assert manifest is not None
    found = (manifest.whole is not None, manifest.delta.parent if manifest.delta else None)
    assert found == (made.whole, made.parent)
    return found


def test_deltas_follow_an_anchor_and_every_version_is_exact(versions: Versions, tmp_path: Path) -> None:
    made = [versions.next() for _ in range(8)]
    assert [kinds(one) for one in made] == [
        (True, None),
        (False, "v1-s1"),
        (False, "v2-s2"),
        (True, "v3-s3"),
        (False, "v4-s4"),
        (False, "v5-s5"),
        (True, "v6-s6"),
        (False, "v7-s7"),
    ]
    assert all(0 < (one.density or 0) < 0.2 for one in made[1:])
    assert made[1].written_bytes < 0.3 * made[0].written_bytes
    assert made[0].density is None
    cache = VersionCache(tmp_path / "cache", 1 << 30)
    for one in (made[2], made[7], made[4]):  # missed ones, newer and older ones
        with cache.whole(one.path.name, [FolderSource(tmp_path / "weights")], one.checksum) as folder:
            assert checksum(folder / TENSORS) == one.checksum


def as_engines_have(policy: Policy) -> dict[str, torch.Tensor]:
    return {name: p.detach().to(BF16 if p.ndim > 1 else p.dtype, copy=True) for name, p in policy.trainable()}


def test_the_density_is_the_share_of_elements_that_differ(policy: Policy, versions: Versions) -> None:
    versions.next()
    before = as_engines_have(policy)
    made = versions.next()
    after = as_engines_have(policy)
    changed = sum(int((after[name] != tensor).sum()) for name, tensor in before.items())
    assert made.density == pytest.approx(changed / sum(t.numel() for t in before.values()))
    assert made.metrics == {
        "publish/bytes": float(made.written_bytes),
        "publish/whole": 0.0,
        "publish/density": made.density,
    }


def test_a_dense_delta_is_replaced_by_all_tensors_and_the_next_is_a_delta_of_it(versions: Versions) -> None:
    found = [versions.next(), versions.next(moved=1.0), versions.next()]
    assert [kinds(one) for one in found] == [(True, None), (True, None), (False, "v2-s2")]
    assert (found[1].density or 0) > 0.9
    assert checksum(found[1].path / TENSORS) == found[1].checksum
    assert not list(found[1].path.glob("delta-*"))


def test_an_engine_that_cannot_prepare_needs_all_tensors(versions: Versions) -> None:
    made = [versions.next(), versions.next(prepares=False), versions.next(), versions.next()]
    assert [kinds(one) for one in made] == [(True, None), (True, None), (True, None), (False, "v3-s3")]


def test_an_unchanged_version_has_an_empty_delta(versions: Versions) -> None:
    first, second = versions.next(), versions.next(moved=0.0)
    assert (second.checksum, second.density, kinds(second)) == (first.checksum, 0.0, (False, "v1-s1"))


def test_the_first_version_of_a_trainer_has_all_tensors(
    policy: Policy, base: Path, world: World, tmp_path: Path, versions: Versions
) -> None:
    """A folder that has the tensors only as a delta is written again; one that has them whole is kept."""
    versions.next()
    delta = versions.next()
    later = Versions(policy, base, world, tmp_path / "weights")
    later._number = 2
    made = later.write()
    assert (made.checksum, kinds(made)) == (delta.checksum, (True, None))
    inode = made.path.stat().st_ino
    again = later.write()
    assert (again.path.stat().st_ino, again.checksum, again.digests) == (inode, made.checksum, made.digests)
    assert kinds(later.next()) == (True, None)  # the trainer that kept a folder does not hold its tensors


def test_a_damaged_folder_is_written_again(
    policy: Policy, base: Path, world: World, tmp_path: Path, versions: Versions
) -> None:
    made = versions.next()
    (made.path / TENSORS).write_bytes(b"damaged")
    later = Versions(policy, base, world, tmp_path / "weights")
    later._number = 1
    assert later.write().checksum == made.checksum == checksum(made.path / TENSORS)


def test_after_a_full_disk_the_version_is_written_again(
    versions: Versions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions.next()
    with monkeypatch.context() as patch:
        patch.setattr("agentrl.versions.delta_writer.DeltaWriter._put", no_space)
        with pytest.raises(StoreError, match=r"v2-s2 cannot be written \(rank 0: .*No space left"):
            versions.next()
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["v1-s1"]
    assert kinds(versions.write()) == (True, None)  # its shares are no longer those of version 1
    assert kinds(versions.next()) == (False, "v2-s2")


@pytest.fixture
def small(tmp_path: Path) -> Path:
    return save("Qwen3", tmp_path / "model")


@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_killed_while_it_writes_leaves_no_version(small: Path, tmp_path: Path, who: int) -> None:
    out = tmp_path / "weights"
    out.mkdir()
    run_ranks("rank_failures.py", 2, out, small, who)
    assert [path.name for path in out.glob("[!.]*")] == [f"rank-{1 - who}-knows"]
    remove_drafts(out)  # as the next trainer does
    assert not list(out.glob(".*"))


def test_a_full_disk_of_one_rank_is_every_ranks_error(small: Path, tmp_path: Path, world: World) -> None:
    out = tmp_path / "weights"
    out.mkdir()
    run_ranks("rank_failures.py", 2, out, small, "full")
    policy = load_sharded(Policy, small, world.mesh)
    expected = version(policy, tmp_path / "alone" / "v1-a", small, world)
    found = manifest_in(out / "v1-a")
    assert found is not None
    assert found.checksum == expected.checksum


def test_a_write_that_fails_does_not_stop_the_gathering() -> None:
    """Other ranks wait for this rank's parts of later buckets."""
    gathered: list[int] = []

    def buckets() -> Iterator[list[Any]]:
        for number in range(5):
            gathered.append(number)
            yield [number]

    with pytest.raises(OSError, match="No space left"):
        pump(buckets(), no_space)
    assert gathered == [0, 1, 2, 3, 4]
