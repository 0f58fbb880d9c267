"""A PostgreSQL server for tests: found, or started privately. `sh scripts/postgres` prints the admin URL of one.

Looked for in this order: `$AGENTRL_TEST_POSTGRES_URL`; a server on the local standard port that lets us in; installed
binaries, from which a private server is started in the cache folder; and, as root with apt-get, an installation.
Tests themselves only look (`find_server`): without a server they skip.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import os
import pwd
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import psycopg

VARIABLE = "AGENTRL_TEST_POSTGRES_URL"
NO_SERVER = f"no PostgreSQL server on the local standard port; name one in {VARIABLE} (sh scripts/postgres starts one)"
CONNECT_TIMEOUT_S = 5
MAX_SOCKET_PATH = 100  # bytes; the system's limit is 104 or 108


class PostgresError(Exception):
    """One line for the user."""


def find_server() -> str | None:
    """Admin URL of a running server in which we may create databases; None when there is none.

    Raises PostgresError when `$AGENTRL_TEST_POSTGRES_URL` is set and does not work: what was asked for is not skipped.
    """
    if named := os.environ.get(VARIABLE):
        if fault := fault_of(named):
            raise PostgresError(f"{VARIABLE}={named}: {fault}")
        return named
    user = getpass.getuser()
    local = [f"postgresql://{name}@127.0.0.1:5432/postgres" for name in ("postgres", user)]
    return next((url for url in (*local, "postgresql:///postgres") if not fault_of(url)), None)


def fault_of(url: str) -> str:
    """Why the server at this URL is of no use for tests, in one line; empty when it is of use."""
    try:
        with connect(url) as conn:
            rights = conn.execute("SELECT rolsuper OR rolcreatedb, rolname FROM pg_roles WHERE rolname = current_user")
            may_create, user = rights.fetchone() or (False, "?")
            return "" if may_create else f"user {user} may not create databases"
    except psycopg.Error as error:
        return " ".join(str(error).split())


def connect(url: str) -> psycopg.Connection:
    """A connection in autocommit mode; takes SQLAlchemy's spelling too."""
    libpq = url.replace("postgresql+psycopg://", "postgresql://", 1)
    return psycopg.connect(libpq, autocommit=True, connect_timeout=CONNECT_TIMEOUT_S)


def find_binaries() -> Path | None:
    """Folder with initdb, pg_ctl and postgres of the newest installed version."""
    versions = sorted(Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name), reverse=True)
    on_path = shutil.which("initdb")
    folders = [*([Path(on_path).resolve().parent] if on_path else []), *versions]
    return next((folder for folder in folders if all((folder / n).exists() for n in ("initdb", "pg_ctl"))), None)


class Cluster:
    """A private server in one folder, reached through a socket in it and nothing else; `owner` (uid, gid) runs it.

    PostgreSQL refuses to run as root: then it runs as the user `postgres`, who must be able to reach the folder.
    """

    def __init__(self, folder: Path, binaries: Path) -> None:
        self.folder, self.binaries = folder.absolute(), binaries
        self.data, self.sockets, self.log = self.folder / "data", self.folder / "socket", self.folder / "log"
        self._as_user: list[str] = []
        self.owner = (os.getuid(), os.getgid())
        if os.getuid() == 0:
            account = pwd.getpwnam("postgres")
            self.owner = (account.pw_uid, account.pw_gid)
            ids = [f"--reuid={account.pw_uid}", f"--regid={account.pw_gid}", "--clear-groups"]
            self._as_user = ["setpriv", *ids] if shutil.which("setpriv") else ["runuser", "-u", "postgres", "--"]
        if len(str(self.sockets)) > MAX_SOCKET_PATH - len("/.s.PGSQL.5432"):
            raise PostgresError(f"the path {self.sockets} is too long for a socket (AGENTRL_CACHE moves it)")

    @property
    def url(self) -> str:
        """Admin URL."""
        return f"postgresql://postgres@/postgres?host={self.sockets}"

    def create(self) -> None:
        """Make the cluster's files, once."""
        if (self.data / "PG_VERSION").exists():
            return
        for folder in (self.folder, self.sockets):
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
            os.chown(folder, *self.owner)
        shutil.rmtree(self.data, ignore_errors=True)
        self._run("initdb", "-D", self.data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C")
        with (self.data / "postgresql.conf").open("a") as config:
            config.write(f"listen_addresses = ''\nunix_socket_directories = '{self.sockets}'\n")

    def start(self) -> None:
        """Start it and wait until it accepts connections."""
        self._run("pg_ctl", "start", "-w", "-D", self.data, "-l", self.log)

    def running(self) -> bool:
        """Whether it runs."""
        return self._call("pg_ctl", "status", "-D", self.data).returncode == 0

    def restart(self, mode: str = "immediate") -> None:
        """Stop and start it; `immediate` is a crash: nothing is flushed, every connection is cut."""
        self._run("pg_ctl", "restart", "-w", "-m", mode, "-D", self.data, "-l", self.log)

    def stop(self, mode: str = "immediate") -> None:
        """Stop it."""
        self._run("pg_ctl", "stop", "-w", "-m", mode, "-D", self.data)

    def _call(self, name: str, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        command = [*self._as_user, str(self.binaries / name), *map(str, arguments)]
        # pg_ctl leaves the server behind with our descriptors: a pipe would never end.
        with (self.folder / f"{name}.out").open("w+") as output:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=self.folder, check=False
            )
            output.seek(0)
            return subprocess.CompletedProcess(command, done.returncode, output.read(), "")

    def _run(self, name: str, *arguments: str | Path) -> None:
        done = self._call(name, *arguments)
        if done.returncode != 0:
            last = (done.stdout.strip().splitlines() or ["no output"])[-1]
            raise PostgresError(f"{name} failed ({last}); see {self.log if self.log.exists() else self.folder}")


def reachable_folder() -> Path:
    """Where the private server's files go: the cache folder, or /var/tmp where its user cannot reach that."""
    cache = Path(os.environ.get("AGENTRL_CACHE") or Path.home() / ".cache" / "agentrl")
    if os.getuid() != 0:
        return cache / "postgres"
    cache.mkdir(parents=True, exist_ok=True)
    open_to_all = all(path.stat().st_mode & 0o001 for path in (cache, *cache.parents))
    return (cache if open_to_all else Path("/var/tmp/agentrl")) / "postgres"


def install() -> bool:
    """Install PostgreSQL with apt-get where we may; whether it was."""
    if os.getuid() != 0 or not shutil.which("apt-get"):
        return False
    print("postgres: installing it with apt-get", file=sys.stderr, flush=True)
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    steps = (["apt-get", "update", "-qq"], ["apt-get", "install", "-y", "-qq", "postgresql"])
    return all(subprocess.run(step, stdout=sys.stderr, env=environment, check=False).returncode == 0 for step in steps)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def ensure_server() -> str:
    """Admin URL of a server: one that is there, else our private one, started if need be.

    Raises PostgresError when there is none and none can be started.
    """
    if url := find_server():
        return url
    if find_binaries() is None and install() and (url := find_server()):
        return url
    binaries = find_binaries()
    if binaries is None:
        raise PostgresError(f"install PostgreSQL (Debian, Ubuntu: apt install postgresql), or set {VARIABLE}")
    folder = reachable_folder()
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder.parent / ".postgres.lock"):
        cluster = Cluster(folder, binaries)
        cluster.create()
        if not cluster.running():
            cluster.start()
    return cluster.url


def main() -> NoReturn:
    """Print the admin URL, or one line that says what is missing."""
    try:
        print(ensure_server())
    except (PostgresError, OSError) as error:
        sys.exit(f"postgres: {error}")
    sys.exit(0)


if __name__ == "__main__":
    main()
