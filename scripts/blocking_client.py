"""Write the blocking client from the awaiting one: `python scripts/blocking_client.py > agentrl/client/blocking.py`.

Two substitutions and the formatter suffice; unasync would do the same at the price of three packages.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
NAMES = {
    "AsyncClient": "Client",
    "AsyncSession": "Session",
    "aclose": "close",
    "__aenter__": "__enter__",
    "__aexit__": "__exit__",
    "asyncio": "time",
}
HEADER = '"""The blocking client and its sessions. Generated from awaiting.py by scripts/blocking_client.py."""'


def main() -> None:
    """Print the blocking module, formatted."""
    _, _, code = (ROOT / "agentrl" / "client" / "awaiting.py").read_text().partition("\n")
    code = re.sub(r"\b(async|await) ", "", code)
    code = re.sub(rf"\b({'|'.join(NAMES)})\b", lambda found: NAMES[found[0]], code)
    ruff = [sys.executable, "-m", "ruff", "format", "--config", "pyproject.toml", "-"]
    subprocess.run(ruff, input=f"{HEADER}\n{code}", cwd=ROOT, text=True, check=True)


if __name__ == "__main__":
    main()
