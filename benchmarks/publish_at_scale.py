"""Models a publish to 1,000 engines: how long until all serve the version, and how many take calls meanwhile.

    python benchmarks/publish_at_scale.py --out benchmarks/results/publish_at_scale.json

No engine runs: links, staging and pauses are modelled (fleets/modelled.py) and the clock jumps. The plans are those of
the product: which host reads from which, and which engines are paused. 125 hosts of 8 engines, 25 Gbit/s each way; a
shared folder of 10 GB/s for all readers; object storage of 100 GB/s and 1 GB/s for one reader; a proxy with one host's
link. A version is 16 GB (8 billion parameters in bfloat16); its delta that of 3 % changed elements
(benchmarks/deltas.py), written by 8 ranks.

- `bound/WAY/SIZE`: bytes over bandwidth, which no way can undercut: the bytes through one host's link, or all bytes
  that the origin sends through the origin's link, whichever takes longer.
- `fetched/WAY/SIZE`: until all hosts have the version, and the ratio to `bound`.
- `served/WAY/SIZE`: until all engines serve it: staged (modelled, 16 GB/s of memory for the engines of a host together)
  and swapped in waves.
- `serving/WAY/SIZE`: the smallest share of the engines that took calls; the setting is 0.75.
- `stall/WAY/SIZE`: the longest pause of an engine.

`paused` is the way of engines that cannot prepare: they read the version while they are paused. `tree`: hosts that have
the version serve others. `relay`: hosts pass on each file (0.5 GB; of a delta, one of a rank) while they fetch the
rest, which is what the proxy plans.
"""

from __future__ import annotations

from dataclasses import replace

import harness
from fleets.modelled import Fleet, Links, Way

HOSTS, ENGINES = 125, 8
HOST_BPS = 25e9 / 8
WHOLE, FILE, RANKS = 16e9, 512e6, 8
FOLDER = Links(host=HOST_BPS, origin=10e9)
STORAGE = Links(host=HOST_BPS, origin=100e9, reader=1e9)
PROXY = Links(host=HOST_BPS, origin=HOST_BPS)


def main() -> None:
    """Model, print a table, write JSON."""
    options = harness.arguments(
        __doc__,
        delta_share=(float, 0.0155, "bytes of a delta as a share of the whole version"),
        fan_out=(int, 2, "hosts that one host serves at once"),
    )
    report = harness.Report("publish_at_scale")
    report.notes |= {
        "hosts": HOSTS,
        "engines": HOSTS * ENGINES,
        "whole_bytes": WHOLE,
        "delta_share": options.delta_share,
    }
    for size, n_bytes in (("whole", WHOLE), ("delta", WHOLE * options.delta_share)):
        for name, way in ways(n_bytes, options.fan_out).items():
            model(report, f"{name}/{size}", way)
    harness.finish(report, options.out)


def ways(n_bytes: float, fan_out: int) -> dict[str, Way]:
    """The ways to compare. Engines that cannot prepare have no deltas: they read the whole version."""
    file_bytes = min(FILE, n_bytes / RANKS)
    folder = Way(links=FOLDER, n_bytes=n_bytes, whole_bytes=WHOLE, origins=32, file_bytes=file_bytes)
    found = {
        "folder": folder,
        "storage": replace(folder, links=STORAGE, origins=HOSTS),
        "tree": replace(folder, links=PROXY, origins=fan_out, fan_out=fan_out),
        "relay": replace(folder, links=PROXY, origins=fan_out, fan_out=fan_out, relays=True),
    }
    return {"paused": replace(folder, prepared=False)} | found if n_bytes == WHOLE else found


def model(report: harness.Report, name: str, way: Way) -> None:
    """Add the figures of one way."""
    found = Fleet(way, HOSTS, ENGINES).publish()
    report.add(f"bound/{name}", [bound(way)], "s")
    if way.prepared:
        report.add(f"fetched/{name}", [found.all_present_s], "s", f"bound/{name}")
    report.add(f"served/{name}", [found.all_serve_s], "s")
    report.add(f"serving/{name}", [found.least_serving], "share")
    report.add(f"stall/{name}", [found.stall_s], "s")


def bound(way: Way) -> float:
    """Seconds that the links need at least."""
    links = way.links
    readers = HOSTS if way.prepared else HOSTS * ENGINES
    from_origin = way.n_bytes * (1 if way.fan_out else readers) / links.origin
    into_host = way.n_bytes * (1 if way.prepared else ENGINES) / min(links.host, links.reader)
    return max(from_origin, into_host)


if __name__ == "__main__":
    main()
