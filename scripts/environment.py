"""Builds a shared environment and links this checkout to it. Standard library only; run by scripts/setup.

    ~/.cache/agentrl/envs/KEY/    a venv with every pin of a lock file; KEY is a hash of lock, Python, machine
    .venv/                        requirements/cpu.lock: a light venv, a .pth file that adds the shared packages,
                                  agentrl itself editable
                                  requirements/gyms.lock: one more .pth file, for libraries that not everybody needs
    .venv-vllm                    requirements/vllm.lock: a light venv too; one .pth file adds the shared packages, one
                                  this checkout, whose launcher runs there
    .venv-agents, -docs, ...      requirements/agents.lock, ...: links, as nothing of ours is installed there
    .venv-coders                  requirements/coders.lock, and the npm packages of requirements/coders: a link too
    .venv-servers                 the npm packages of requirements/servers alone: a link too

pip does this, since uv is not on every machine, gives each checkout files of its own, and installs no npm packages.
A shared environment counts only with its stamp file, which is written last; without it, it is built anew.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOCKS = {
    "main": ROOT / "requirements" / "cpu.lock",
    "gyms": ROOT / "requirements" / "gyms.lock",
    "agents": ROOT / "requirements" / "agents.lock",
    "verifiers": ROOT / "requirements" / "verifiers.lock",
    "openenv": ROOT / "requirements" / "openenv.lock",
    "inspect": ROOT / "requirements" / "inspect.lock",
    "harbor": ROOT / "requirements" / "harbor.lock",
    "peers": ROOT / "requirements" / "peers.lock",
    "trl": ROOT / "requirements" / "trl.lock",
    "mutants": ROOT / "requirements" / "mutants.lock",
    "coders": ROOT / "requirements" / "coders.lock",
    "servers": ROOT / "requirements" / "servers.lock",
    "docs": ROOT / "requirements" / "docs.lock",
    "lint": ROOT / "requirements" / "lint.lock",
    "verl": ROOT / "requirements" / "verl.lock",
    "vllm": ROOT / "requirements" / "vllm.lock",
}
ADDED = {"gyms"}
"""Environments whose packages are added to those of .venv."""
WITH_CHECKOUT = {"vllm"}
"""Environments in which this checkout's code runs too."""
NPM_FOLDERS = {"coders": ROOT / "requirements" / "coders", "servers": ROOT / "requirements" / "servers"}
"""Environments that hold npm packages too: their package.json and package-lock.json."""
PYTHON: str = getattr(sys, "_base_executable", sys.executable)  # not the Python of an active venv
CACHE = Path(os.environ.get("AGENTRL_CACHE") or Path.home() / ".cache" / "agentrl")
TORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
STAMP = ".complete"
FOR_GPUS = "python3 -m venv .venv-gpu && .venv-gpu/bin/pip install -e '.[gpu,lora,postgres]' (docs/gpus.md)"
"""PyPI's torch for Linux is the CUDA build."""
FREE_BYTES = 5 * 10**9
PIPS = 2
"""How many pips install one environment side by side: each unpacks on one core."""


def main() -> int:
    """Make one environment of LOCKS ready; prints a line if it was not ready before."""
    started = time.monotonic()
    name = sys.argv[1] if len(sys.argv) > 1 else "main"
    npm = NPM_FOLDERS.get(name)
    shared = CACHE / "envs" / key(LOCKS[name], *([npm / "package-lock.json"] if npm else []))
    try:
        with locked(CACHE / "envs" / ".lock") as lock:
            if not (shared / STAMP).exists():
                build_shared(shared, read_pins(LOCKS[name].read_text()), lock, npm)
        if name in ADDED:
            linked = add_packages(name, shared)
        elif name in WITH_CHECKOUT:
            linked = add_checkout(ROOT / f".venv-{name}", shared)
        else:
            linked = link_checkout(shared) if name == "main" else link(ROOT / f".venv-{name}", shared)
    except SetupError as error:
        print(f"setup: {error}", file=sys.stderr)
        return 1
    if linked:
        ready = ".venv/bin/agentrl --help" if name in ("main", *ADDED) else f".venv-{name}/bin/python"
        print(f"setup: ready in {time.monotonic() - started:.0f} s ({ready})")
        if name == "main" and (found := gpu()):
            print(
                f"setup: {found} shows a GPU, which .venv cannot use: its torch is a CPU build. For the GPU: {FOR_GPUS}"
            )
    return 0


def gpu(device: Path = Path("/dev/nvidia0")) -> str | None:
    """What shows that this machine has an NVIDIA GPU; None without one."""
    return str(device) if device.exists() else shutil.which("nvidia-smi")


class SetupError(Exception):
    """An error whose message is one line for the user."""


def key(*lock_files: Path) -> str:
    """The name of the shared environment: it differs between lock files, Pythons and machines."""
    version = ".".join(map(str, sys.version_info[:3]))
    parts = (*(file.read_text() for file in lock_files), version, sys.base_prefix, platform.machine())
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return f"py{sys.version_info[0]}{sys.version_info[1]}-{digest[:12]}"


def read_pins(text: str) -> list[str]:
    """The pins, `name==version` and their hashes in one line, without comments."""
    lines = (line.split("#")[0].strip() for line in text.replace("\\\n", "").splitlines())
    return [" ".join(line.split()) for line in lines if line]


@contextlib.contextmanager
def locked(path: Path) -> Iterator[int]:
    """Hold an exclusive lock; yields its file descriptor. Prints a line while another setup holds the lock."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("setup: waiting for another setup to finish", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield lock.fileno()


def build_shared(shared: Path, pins: list[str], lock: int, npm: Path | None = None) -> None:
    """Install every pin, and the npm packages of the folder `npm`, into a new environment; the stamp comes last."""
    if npm and not shutil.which("npm"):
        raise SetupError("needs Node 18 or newer with npm, and finds no npm on PATH")
    if shared.exists():
        print("setup: an earlier setup was interrupted; starting over", flush=True)
        shutil.rmtree(shared)
    if shutil.disk_usage(shared.parent).free < FREE_BYTES:
        raise SetupError(f"{shared.parent} needs {FREE_BYTES / 1e9:.0f} GB of free space (AGENTRL_CACHE moves it)")
    print(f"setup: building the shared environment, once per machine: {shared}", flush=True)
    run([PYTHON, "-m", "venv", str(shared)])
    python = str(shared / "bin" / "python")
    torch = [pin for pin in pins if pin.startswith("torch==")]
    calls = []
    for pin in torch:  # in a separate call: no other package may come from PyTorch's index
        chosen, options = choose_torch(python, pin)
        calls.append([chosen, *options])
    with tempfile.TemporaryDirectory() as folder:
        others = [pin for pin in pins if pin not in torch]
        for number in range(min(PIPS, len(others))):
            file = Path(folder, f"{number}.txt")
            file.write_text("\n".join(others[number::PIPS]))
            calls.append(["--require-hashes", "--requirement", str(file)])
        install(python, calls, shared, len(pins), lock)
    if npm:
        install_npm(npm, shared, lock)
    compile_all(python, shared)
    (shared / STAMP).write_text(time.strftime("%Y-%m-%dT%H:%M:%SZ\n", time.gmtime()))


def choose_torch(python: str, pin: str) -> tuple[str, list[str]]:
    """The exact torch requirement, and pip's options to find it. It is pip's own choice if that is a CPU build, else
    the build from PyTorch's CPU index, so that a CUDA build is never installed.
    """
    report = pip_report(python, pin)
    found = report["install"][0]["metadata"]["version"] if report else ""
    if found.endswith("+cpu") or (found and sys.platform == "darwin"):
        return f"torch=={found}", []
    print(f"setup: pip offers no CPU build of {pin}: about 200 MB come from {TORCH_CPU_INDEX}", flush=True)
    suffix = "" if sys.platform == "darwin" else "+cpu"
    return f"{pin}{suffix}", ["--extra-index-url", TORCH_CPU_INDEX]


def pip_report(python: str, pin: str) -> dict[str, Any] | None:
    """pip's report of what `pip install PIN` would install; None if pip finds nothing."""
    command = [python, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed", "--quiet"]
    done = subprocess.run([*command, "--report", "-", pin], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return None
    report: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])  # pip's warnings may come first
    return report


def install(python: str, calls: list[list[str]], shared: Path, total: int, lock: int) -> None:
    """Run a `pip install` for each list of arguments, side by side, with a counter in place of their output; the output
    of one that fails is shown.

    Each pip inherits the lock. If this process is killed, the lock is held until they end, and no other setup runs
    beside them. The calls name different packages, so no pip touches the files of another.
    """
    command = [python, "-m", "pip", "install", "--no-deps", "--no-compile", "--disable-pip-version-check"]
    site_packages = next((shared / "lib").glob("python*/site-packages"))
    n_before = sum(1 for _ in site_packages.glob("*.dist-info"))  # the packages of pip itself
    counter = Counter(total)
    logs = [shared / f"install-{number}.log" for number in range(len(calls))]
    processes = [start([*command, *arguments], log, lock) for arguments, log in zip(calls, logs, strict=True)]
    try:
        while any(process.poll() is None for process in processes):
            texts = [log.read_text(errors="replace") for log in logs]
            collected = [name for text in texts for name in re.findall(COLLECTED, text, re.MULTILINE)]
            if all("\nInstalling collected packages" in text for text in texts):
                counter.show("installing", sum(1 for _ in site_packages.glob("*.dist-info")) - n_before)
            elif collected:
                counter.show("downloading", len(collected), collected[-1])
            time.sleep(0.3)
    except KeyboardInterrupt:
        for process in processes:
            process.wait()
        raise SetupError("interrupted; run it again to start over") from None
    counter.close()
    for process, log in zip(processes, logs, strict=True):
        if process.returncode != 0:
            lines = [line for line in log.read_text(errors="replace").splitlines() if line and "is ignored" not in line]
            raise SetupError("pip failed:\n  " + "\n  ".join(lines[-12:]) + f"\n(all of it: {log})")


COLLECTED = r"^(?:Collecting|Processing) .*?([\w.-]+?)[=-]+\d"
"""A line of pip's output that names a package."""


def start(command: list[str], log: Path, lock: int) -> subprocess.Popen[bytes]:
    """Start a command that inherits the lock and writes to a log."""
    with log.open("w") as output:
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, pass_fds=(lock,)
        )


def install_npm(folder: Path, shared: Path, lock: int) -> None:
    """Install the packages of a package-lock.json, and put their commands into the environment's `bin`.

    Install scripts do not run, except Claude Code's, which replaces its command by the program for this machine.
    """
    print("setup: npm packages", flush=True)
    packages = shared / "npm"
    packages.mkdir()
    for name in ("package.json", "package-lock.json"):
        shutil.copy(folder / name, packages / name)
    run(["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--prefix", str(packages)], lock)
    claude = packages / "node_modules" / "@anthropic-ai" / "claude-code" / "install.cjs"
    if claude.exists():
        run(["node", str(claude)])
    for command in sorted((packages / "node_modules" / ".bin").iterdir()):
        (shared / "bin" / command.name).symlink_to(command)


def compile_all(python: str, shared: Path) -> None:
    """Compile byte code on all cores (pip would use one). Without byte code the first start of SGLang takes minutes."""
    print("setup: compiling", flush=True)
    command = [python, "-m", "compileall", "-q", "-j", "0", "-x", "/tests?/", str(shared / "lib")]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=False)  # a few packages ship files of other Pythons


class Counter:
    """Prints `setup: downloading 45/127 jinja2`: in place on a terminal, else on a new line every 10 s at most."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._shown = ""
        self._shown_at = time.monotonic()

    def show(self, doing: str, done: int, name: str = "") -> None:
        text = f"setup: {doing} {done}/{self._total} {name}"
        if sys.stdout.isatty():
            print(f"\r\x1b[K{text}", end="", flush=True)
        elif text != self._shown and time.monotonic() - self._shown_at > 10:
            print(text, flush=True)
            self._shown_at = time.monotonic()
        self._shown = text

    def close(self) -> None:
        if sys.stdout.isatty():
            print("\r\x1b[K", end="", flush=True)


def link(path: Path, shared: Path) -> bool:
    """Make `path` a link to the shared environment; False if it was one before."""
    if path.is_symlink() and path.readlink() == shared:
        return False
    if path.is_dir() and not path.is_symlink():
        raise SetupError(f"{path} is a folder where a link is due: remove it")
    staging = path.with_name(f"{path.name}.{os.getpid()}.new")
    staging.symlink_to(shared)
    staging.replace(path)
    return True


def link_checkout(shared: Path) -> bool:
    """Point `.venv` at the shared environment, and install this checkout into it; False if that was done before."""
    venv = ROOT / ".venv"
    stamp = venv / ".agentrl-setup"
    state = f"{shared}\n{hashlib.sha256((ROOT / 'pyproject.toml').read_bytes()).hexdigest()}\n"
    if stamp.exists() and stamp.read_text() == state and (venv / "bin" / "agentrl").exists():
        return False
    with locked(CACHE / "envs" / f".{hashlib.sha256(str(venv).encode()).hexdigest()[:12]}.lock"):
        run([PYTHON, "-m", "venv", "--without-pip", str(venv)])
        point("agentrl_shared_env.pth", shared)
        pip = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run([*pip, "--no-deps", "--no-build-isolation", "--no-index", "--editable", str(ROOT)])
        stamp.write_text(state)
    return True


def add_packages(name: str, shared: Path) -> bool:
    """Add the packages of a shared environment to those of `.venv`; False if that was done before."""
    if not (ROOT / ".venv" / "bin" / "agentrl").exists():
        raise SetupError("run `make setup` first")
    return point(f"agentrl_shared_env_{name}.pth", shared)  # read behind agentrl_shared_env.pth, whose versions count


def add_checkout(venv: Path, shared: Path) -> bool:
    """Make `venv` an environment with the packages of a shared one and this checkout's; False if it was one before."""
    if not (venv / "bin" / "python").exists():
        run([PYTHON, "-m", "venv", "--without-pip", str(venv)])
    pointed = point("agentrl_shared_env.pth", shared, venv)
    return write_pth(venv, "agentrl_this_checkout.pth", ROOT) or pointed


def point(pth_name: str, shared: Path, venv: Path | None = None) -> bool:
    """Let a .pth file of a venv name the packages of a shared environment; False if it did before. None: `.venv`."""
    return write_pth(venv or ROOT / ".venv", pth_name, next((shared / "lib").glob("python*/site-packages")))


def write_pth(venv: Path, name: str, folder: Path) -> bool:
    """Let a .pth file of a venv name a folder; False if it did before."""
    pth = next((venv / "lib").glob("python*/site-packages")) / name
    line = f"{folder}\n"
    if pth.exists() and pth.read_text() == line:
        return False
    staging = pth.with_suffix(f".{os.getpid()}.new")
    staging.write_text(line)
    staging.replace(pth)
    return True


def run(command: list[str], *inherited: int) -> None:
    """Run a command with these descriptors open; its output is shown only if it fails."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, pass_fds=inherited, check=False
    )
    if done.returncode != 0:
        raise SetupError(f"{' '.join(command)} failed:\n{done.stdout}")


if __name__ == "__main__":
    sys.exit(main())
