"""A device guard for the fake accelerator, in C++: torch's Python guard has no streams, and autograd exchanges them.

It is compiled once by g++ for each version of torch, into `$AGENTRL_CACHE/native`.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import torch

from agentrl.errors import UserError
from agentrl.models import cache_dir

SOURCE = """
#include <c10/core/impl/DeviceGuardImplInterface.h>

using namespace c10;

struct OneDevice final : impl::DeviceGuardImplInterface {
  static constexpr DeviceType static_type = DeviceType::PrivateUse1;
  static Device only() { return Device(DeviceType::PrivateUse1, 0); }
  static Stream stream() { return Stream(Stream::DEFAULT, only()); }
  DeviceType type() const override { return DeviceType::PrivateUse1; }
  Device exchangeDevice(Device) const override { return only(); }
  Device getDevice() const override { return only(); }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const override { return stream(); }
  Stream getDefaultStream(Device) const override { return stream(); }
  Stream getStreamFromGlobalPool(Device, bool) const override { return stream(); }
  Stream getNewStream(Device, int) const override { return stream(); }
  Stream exchangeStream(Stream) const override { return stream(); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, OneDevice);
"""
"""One device with one stream: everything is over when it was asked for."""
LIMIT_S = 300.0


def compiler() -> str | None:
    """The C++ compiler, if there is one."""
    return shutil.which(os.environ.get("CXX", "g++"))


@cache
def load_guard() -> None:
    """Compile the guard unless the cache has it, and register it with torch.

    Raises UserError when there is no compiler, or when it fails.
    """
    torch.ops.load_library(str(_compiled(cache_dir().parent / "native")))  # type: ignore[no-untyped-call]


def _compiled(folder: Path) -> Path:
    base = Path(torch.__file__).parent
    abi = int(torch.compiled_with_cxx11_abi())
    name = hashlib.sha256(f"{SOURCE}\n{torch.__version__}\n{base}\n{abi}".encode()).hexdigest()[:16]
    library = folder / f"device_guard-{name}.so"
    if library.is_file():
        return library
    if (found := compiler()) is None:
        raise UserError("the fake accelerator needs a C++ compiler: install g++, or set CXX to another")
    folder.mkdir(parents=True, exist_ok=True)
    draft = folder / f"{library.name}.{os.getpid()}"
    source = draft.with_suffix(".cpp")
    source.write_text(SOURCE)
    flags = ["-shared", "-fPIC", "-O1", "-std=c++20", f"-D_GLIBCXX_USE_CXX11_ABI={abi}", f"-I{base / 'include'}"]
    libraries = [f"-L{base / 'lib'}", "-lc10", f"-Wl,-rpath,{base / 'lib'}"]
    try:
        subprocess.run(
            [found, *flags, str(source), *libraries, "-o", str(draft)],
            check=True,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        draft.replace(library)
    except subprocess.SubprocessError as error:
        lines = (getattr(error, "stderr", None) or str(error)).strip().splitlines()
        raise UserError(f"the fake accelerator's device guard does not compile: {lines[0]}") from error
    finally:
        source.unlink(missing_ok=True)
        draft.unlink(missing_ok=True)
    return library
