"""Audit a fleet's KV cache with pandas, and plot it.

    pip install "objkv[notebook]"
    python -m examples.notebook

Each ``# %%`` begins a cell in VS Code, PyCharm, and JupyterLab with Jupytext. The stores are those
of replicas and of the ``objkv`` command: ``OBJKV_*`` or a file. If they are empty, the program
makes a small sample in a temporary folder, in a clone only. The role reader is enough.
"""

# %%
import random
import tempfile
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pandas as pd

import objkv

DAY_S = 24 * 3600


def sample_prompts() -> Iterator[dict[str, Any]]:
    """Three tenants' month: each has a system prompt, documents and questions about them."""
    dice = random.Random(7)
    for tenant, documents in (("search", 14), ("support", 8), ("research", 4)):
        system = [dice.randrange(50_000) for _ in range(512)]
        for _ in range(documents):
            document = [dice.randrange(50_000) for _ in range(256 * dice.randrange(2, 12))]
            for question in range(dice.randrange(1, 5)):
                yield {
                    "tokens": system + document + [question] * 256,
                    "model": "acme/sample-8b" if tenant != "research" else "acme/sample-70b",
                    "tenant": tenant,
                    "age_s": dice.uniform(0, 30) * DAY_S,
                    "hits": dice.choice((0, 0, 1, 3, 9)),
                }


client = objkv.open(role="reader")
if not client.namespaces():
    from tests.contracts.sample import SamplePrompt, save_sample

    print("nothing is stored yet; here is a sample")
    folder = tempfile.mkdtemp(prefix="objkv-sample-")
    urls = {"bulk_url": f"file://{folder}/chunks", "index_url": f"sqlite://{folder}/index.sqlite"}
    save_sample((SamplePrompt(**prompt) for prompt in sample_prompts()), **urls)
    client = objkv.open(**urls, role="reader")

# %% [markdown]
# ## Contents and owners
#
# `audit()` compares the bulk store with the index. Every list in its report makes a table.

# %%
report = client.audit()
namespaces = pd.DataFrame(report.namespaces)
columns = ["model", "tenant", "roots", "chunks", "tokens", "nbytes", "hits", "unused_bytes"]
print(namespaces[columns].to_string(index=False))
print(f"storage costs {report.cost.month:.2f} $ a month, of that {report.cost.unused or 0:.2f} $ "
      "for chunks that were never used")  # fmt: skip
for finding in report.findings.counts:
    if finding.count:
        print(f"{finding.count} {finding.kind}: {finding.remedy}")

# %% [markdown]
# ## Every chunk as a row
#
# `chunks()` reads the index. With `columns`, the table of an empty store has them too.

# %%
chunks = pd.DataFrame(client.chunks(), columns=[f.name for f in fields(objkv.Chunk)])
chunks = chunks.merge(namespaces[["namespace", "model", "tenant"]], on="namespace")
chunks["age_days"] = (report.made_s - chunks["created_s"]) / DAY_S
chunks["used"] = chunks["hits"] > 0
print(chunks.groupby("tenant")[["nbytes", "hits"]].sum().sort_values("nbytes", ascending=False))

# %% [markdown]
# ## Pictures

# %%
plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "font.size": 9})
USED, UNUSED = "#1f7a8c", "#c9d6df"
figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.6), layout="constrained")

by_tenant = chunks.pivot_table("nbytes", "tenant", "used", "sum", fill_value=0) / 2**20
by_tenant = by_tenant.reindex(columns=[True, False], fill_value=0)
by_tenant = by_tenant.loc[by_tenant.sum(axis="columns").sort_values().index]
by_tenant.columns = ["loaded at least once", "never loaded"]
by_tenant.plot.barh(stacked=True, ax=left, color=[USED, UNUSED])
left.set(title="Stored bytes per tenant", xlabel="MiB", ylabel="")
left.legend(frameon=False)

ages = [chunks.loc[chunks["used"] == used, "age_days"] for used in (True, False)]
middle.hist(ages, bins=30, stacked=True, color=[USED, UNUSED])
middle.set(title="Age of chunks", xlabel="days since they were written", ylabel="chunks")

for tenant, own in chunks.groupby("tenant"):
    depth = own.groupby("token_start")["hits"].mean()
    right.plot(depth.index, depth.values, label=tenant, drawstyle="steps-post")
right.set(title="Where in a prompt hits fall", xlabel="token", ylabel="mean hits of a chunk")
right.legend(frameon=False)

file = Path("objkv-audit.png").absolute()
figure.savefig(file, dpi=150)
print(f"picture: {file}")
client.close()
