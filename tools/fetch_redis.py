"""Put a redis-server into an environment, for tests: `fetch_redis.py VENV` makes `VENV/redis/redis-server`.

Nothing, where one is on PATH. Else Debian's packages are downloaded and unpacked, not installed: apt needs no
root for that, with lists of its own if the machine has none. Where that fails, too, a warning is printed and
the tests that need Redis skip: it is not worth a failed set-up.
"""

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGES = ["redis-server", "redis-tools"]  # the binary has moved from one to the other
PROGRAM = Path("usr/bin/redis-server")
LIBRARIES = {  # what the program is linked against; the C library's own parts are everywhere
    "libatomic": "libatomic1",
    "libcap": "libcap2",
    "libcrypto": "libssl3",
    "libgcrypt": "libgcrypt20",
    "libgpg-error": "libgpg-error0",
    "libhiredis": "libhiredis0.14",
    "libjemalloc": "libjemalloc2",
    "liblua5": "liblua5.1-0",
    "liblz4": "liblz4-1",
    "liblzf": "liblzf1",
    "liblzma": "liblzma5",
    "libssl": "libssl3",
    "libstdc++": "libstdc++6",
    "libsystemd": "libsystemd0",
    "libzstd": "libzstd1",
}
WRAPPER = """#!/bin/sh
root=$(dirname "$(readlink -f "$0")")/root
LD_LIBRARY_PATH=$(echo "$root"/usr/lib/* "$root"/lib/* | tr ' ' ':')
export LD_LIBRARY_PATH
exec "$root/usr/bin/redis-server" "$@"
"""
TIMEOUT_S = 120


class Unavailable(Exception):
    """There is no redis-server to be had this way."""


def run(command: list[str], **options) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, **options)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Unavailable(f"{command[0]}: {error}") from error
    if done.returncode:
        told = (done.stderr or done.stdout).strip().splitlines() or [f"exit status {done.returncode}"]
        raise Unavailable(f"{' '.join(command)}: {told[-1]}")
    return done.stdout


class Apt:
    """Downloads packages; with lists of its own when the machine's cannot serve."""

    def __init__(self, scratch: Path):
        self.folder = scratch / "debs"
        self.folder.mkdir()
        self.scratch = scratch
        self.options: list[str] = []

    def download(self, packages: list[str]) -> list[Path]:
        before = set(self.folder.iterdir())
        try:
            self._download(packages)
        except Unavailable:
            if self.options:
                raise
            self._own_lists()
            self._download(packages)
        return sorted(set(self.folder.iterdir()) - before)

    def _download(self, packages: list[str]) -> None:
        run(["apt-get", *self.options, "download", "-qq", *packages], cwd=self.folder)

    def _own_lists(self) -> None:
        (self.scratch / "state/lists/partial").mkdir(parents=True)
        (self.scratch / "cache/archives/partial").mkdir(parents=True)
        settings = [
            f"Dir::State={self.scratch / 'state'}",
            "Dir::State::status=/var/lib/dpkg/status",
            f"Dir::Cache={self.scratch / 'cache'}",
        ]
        self.options = [part for setting in settings for part in ("-o", setting)]
        run(["apt-get", *self.options, "update", "-qq"])


def missing_libraries(redis: Path) -> list[str]:
    folders = [str(folder) for top in ("usr/lib", "lib") for folder in (redis / "root" / top).glob("*")]
    told = run(["ldd", str((redis / "root" / PROGRAM).resolve())], env={"LD_LIBRARY_PATH": ":".join(folders)})
    return re.findall(r"^\s*(\S+) => not found", told, re.MULTILINE)


def packages_of(libraries: list[str]) -> list[str]:
    found = set()
    for library in libraries:
        stem = re.split(r"(?:-[\d.]+)?\.so", library)[0]
        package = next((LIBRARIES[name] for name in LIBRARIES if stem.startswith(name)), None)
        if package is None:
            raise Unavailable(f"redis-server needs {library}: add its package to LIBRARIES")
        found.add(package)
    return sorted(found)


def unpack(debs: list[Path], root: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for deb in debs:
        run(["dpkg-deb", "-x", str(deb), str(root)])


def fetch(redis: Path) -> None:
    """Fill the folder `redis`: `root/` with the packages' files, and `redis-server`, which runs them."""
    with tempfile.TemporaryDirectory() as scratch:
        apt = Apt(Path(scratch))
        unpack(apt.download(PACKAGES), redis / "root")
        if not (redis / "root" / PROGRAM).exists():
            raise Unavailable(f"the packages {' '.join(PACKAGES)} hold no {PROGRAM}")
        missing = missing_libraries(redis)
        while missing:
            unpack(apt.download(packages_of(missing)), redis / "root")
            still = missing_libraries(redis)
            if set(still) == set(missing):
                raise Unavailable(f"redis-server needs {' '.join(still)}")
            missing = still
    wrapper = redis / "redis-server"
    wrapper.write_text(WRAPPER)
    wrapper.chmod(0o755)


def works(program: Path) -> bool:
    try:
        return run([str(program), "--version"]).startswith("Redis server")
    except Unavailable:
        return False


def main(environment: Path) -> str:
    redis = environment / "redis"
    if on_path := shutil.which("redis-server"):
        return f"{on_path} is installed"
    if works(redis / "redis-server"):
        return f"{redis / 'redis-server'} is in place"
    shutil.rmtree(redis, ignore_errors=True)
    try:
        fetch(redis)
        if not works(redis / "redis-server"):
            raise Unavailable(f"{redis / 'redis-server'} does not run")
    except Unavailable as error:
        shutil.rmtree(redis, ignore_errors=True)
        return f"WARNING: no redis-server, tests of Redis will skip: {error}"
    return f"unpacked Debian's redis-server into {redis}"


if __name__ == "__main__":
    print(f"fetch_redis: {main(Path(sys.argv[1]))}")
