"""A firewall that lets only the ports through that docs/security.md names: a run trains as in one process."""

import shutil
import sys

import optax
import pytest

import rrfp_jax as rrfp
from tests.nodes import ranks
from tests.support import toy

LIMIT_SECONDS = 240.0
FIRST, LAST = 42000, 42127

RULES = f"""
table inet only {{
    counter dropped {{}}
    chain input {{
        type filter hook input priority 0; policy drop;
        iif lo accept
        ct state established,related accept
        ip saddr 10.77.0.0/24 tcp dport {{ {ranks.PORT}, {FIRST}-{LAST} }} ct state new accept
        ip saddr 10.77.0.0/24 udp dport {FIRST}-{LAST} ct state new accept
        counter name dropped
    }}
}}
"""
"""Between nodes: the coordinator's port, and those from which the kernel gives one to who asks for any."""

PROGRAM = """
import sys
import rrfp_jax as rrfp

rrfp.join()
import optax
from tests.support import toy
from tests.support.no_mail import by_transport

by_transport()  # data needs ports, too
mesh = rrfp.Mesh(pp=2) if sys.argv[2] == "pp" else rrfp.Mesh(dp=2)
settings = rrfp.Settings(transport=sys.argv[1])
trainer = rrfp.Trainer(toy.pipeline(), optax.sgd(0.1), data=toy.microbatches(4), mesh=mesh, settings=settings)
print("losses", [report.loss.hex() for report in trainer.steps(2)])
"""


@pytest.mark.skipif(shutil.which("nft") is None, reason="needs nft (package nftables)")
@pytest.mark.parametrize(
    "ways",
    [
        pytest.param("socket pp", marks=pytest.mark.slow(reason="as NIXL's, with fewer ports")),
        pytest.param("nixl pp", marks=pytest.mark.costly(reason="what trains over nodes, equal to the bit")),
        pytest.param("socket dp", marks=pytest.mark.slow(reason="gloo's port is opened in any run")),
    ],
)
def test_a_run_needs_no_port_but_those_that_the_page_names(nodes, tmp_path, ways):
    for node in ("n0", "n1"):
        narrow = f"echo {FIRST} {LAST} >/proc/sys/net/ipv4/ip_local_port_range && nft -f -"
        done = nodes.run(node, "sh", "-c", narrow, input=RULES)
        assert done.returncode == 0, done.stderr
    command = [sys.executable, "-c", PROGRAM, *ways.split()]
    started = ranks.start(nodes, ["n0", "n1"], command, tmp_path)
    statuses = [rank.wait(LIMIT_SECONDS) for rank in started]
    said = [ranks.said(tmp_path, rank) for rank in (0, 1)]
    assert statuses == [0, 0], said
    mesh = rrfp.Mesh(pp=2) if ways.endswith("pp") else rrfp.Mesh(dp=2)
    alone = rrfp.Trainer(toy.pipeline(), optax.sgd(0.1), data=toy.microbatches(4), mesh=mesh)
    losses = [report.loss.hex() for report in alone.steps(2)]
    assert all(f"losses {losses}" in text for text in said), (losses, said)
    for node in ("n0", "n1"):
        dropped = nodes.run(node, "nft", "list", "counters").stdout
        assert "packets 0 " in dropped, "something is asked for that the page does not name"
