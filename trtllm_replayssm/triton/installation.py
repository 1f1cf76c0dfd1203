"""Which Triton server there is on this machine, and what it needs to find its python backend."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from trtllm_replayssm.errors import UserError, pip_extra

#: Where containers have it, beside PATH.
CONTAINER_FOLDER = "/opt/tritonserver/bin"
#: The package that carries a server, for machines that have none.
PACKAGE = "nvidia-pytriton"
HINT = f"{pip_extra('serve')}, or run inside a container of NVIDIA's tritonserver"
STUB = "triton_python_backend_stub"
#: Fails where a package is missing; prints numpy's version.
PROBE = (
    "from importlib.metadata import version; from importlib.util import find_spec; "
    "print(version('numpy') if find_spec('trtllm_replayssm') else exit(1))"
)


@dataclass(frozen=True)
class Installation:
    """A server that can be started. options, environment: what it needs beside the usual."""

    executable: Path
    options: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


def find_server(given: Path | None, work_folder: Path) -> Installation:
    """The server to use: the given one, the one on PATH or of a container, or the one that the package carries.

    work_folder: where files may be laid that the server needs; must live as long as it does.
    Raises UserError when there is none that can work.
    """
    if given is not None:
        if not os.access(given, os.X_OK) or given.is_dir():
            raise UserError(f"{given} is no program", "--tritonserver must be the path of the tritonserver binary")
        return Installation(given)
    if (found := installed_server()) is not None:
        return Installation(found)
    if (package := package_folder()) is not None:
        return bundled(package, work_folder)
    raise UserError("no Triton server was found: tritonserver is not on PATH, and no package carries one", HINT)


def installed_server() -> Path | None:
    """The server on PATH, or where containers have it."""
    found = shutil.which("tritonserver", path=os.pathsep.join((os.environ.get("PATH", ""), CONTAINER_FOLDER)))
    return None if found is None else Path(found)


def package_folder() -> Path | None:
    """Folder of the package that carries a server."""
    package = find_spec("pytriton")
    return None if package is None or package.origin is None else Path(package.origin).parent


def bundled(package: Path, work_folder: Path) -> Installation:
    """The server inside the package's folder, with the half of the python backend that fits this Python."""
    root, python = package / "tritonserver", f"{sys.version_info.major}.{sys.version_info.minor}"
    stub = root / "python_backend_stubs" / python / STUB
    if not stub.is_file():
        raise UserError(f"{PACKAGE} has no python backend for Python {python}", "use Python 3.10 to 3.12")
    check_packages()
    check_shared_python()
    # The server looks for the backend's parts in one folder, but the package keeps them apart.
    backend = work_folder / "backends" / "python"
    backend.mkdir(parents=True)
    for part in (root / "backends" / "python").iterdir():
        (backend / part.name).symlink_to(part)
    (backend / STUB).unlink(missing_ok=True)
    executable = work_folder / "tritonserver"
    for source, target in ((stub, backend / STUB), (root / "bin" / "tritonserver", executable)):
        shutil.copy(source, target)
        target.chmod(0o755)
    libraries = [str(package.parent / "nvidia_pytriton.libs"), library_folder(), os.environ.get("LD_LIBRARY_PATH", "")]
    environment = {
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, libraries)),
        # The backend's process takes its packages from those of the python3 that it finds here.
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", ""))),
    }
    return Installation(executable, (f"--backend-directory={work_folder / 'backends'}",), environment)


def check_packages() -> None:
    """Raises UserError unless the model's Python has this package, and a numpy that the bundled backend was made for.

    It reads no PYTHONPATH, like a Python in isolated mode. With another numpy, tensors would be empty.
    """
    done = subprocess.run([sys.executable, "-I", "-c", PROBE], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(
            f"{sys.executable} finds no trtllm_replayssm and numpy without PYTHONPATH, which Triton's Python does not read",
            f"install them into its environment: {pip_extra('serve')}",
        )
    numpy = done.stdout.strip()
    if int(numpy.split(".")[0]) >= 2:
        raise UserError(
            f"the python backend of {PACKAGE} needs numpy 1, and numpy {numpy} is installed",
            f"{pip_extra('serve')}, or use a Triton server of 24.12 or newer",
        )


def library_folder() -> str:
    return sysconfig.get_config_var("LIBDIR") or ""


def check_shared_python() -> None:
    """Raises UserError when this Python has no shared library, into which the python backend would load the model."""
    name = sysconfig.get_config_var("INSTSONAME") or ""
    python = f"libpython{sys.version_info.major}.{sys.version_info.minor}.so.1.0"
    for candidate in (python, os.path.join(library_folder(), python), os.path.join(library_folder(), name)):
        try:
            ctypes.CDLL(candidate)
        except OSError:
            continue
        return
    raise UserError(
        f"this Python ({sys.executable}) has no shared library {python}, which Triton's python backend needs",
        f"install it (Debian and Ubuntu: apt-get install {python.removesuffix('.so.1.0')}), or use another Python",
    )
