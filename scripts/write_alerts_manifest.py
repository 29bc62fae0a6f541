"""Write examples/kubernetes/alerts.yaml: the alert rules of examples/monitoring, as an object of
Prometheus Operator.

    python scripts/write_alerts_manifest.py
"""

import textwrap
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
RULES = EXAMPLES / "monitoring" / "alerts.yml"
MANIFEST = EXAMPLES / "kubernetes" / "alerts.yaml"
_HEAD = """\
# Written by scripts/write_alerts_manifest.py from examples/monitoring/alerts.yml: change it there.
apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: objkv
spec:
"""


def manifest() -> str:
    """Return the rules with their comments, indented by two columns."""
    return _HEAD + textwrap.indent(RULES.read_text(), "  ", lambda line: bool(line.strip()))


if __name__ == "__main__":
    MANIFEST.write_text(manifest())
    print(f"wrote {MANIFEST}")
