from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ppdbench.cluster.contract import (
    ClusterSpec,
    Node,
    cluster_from_options,
    read_cluster,
    write_cluster,
)
from ppdbench.core.errors import UsageError
from ppdbench.core.topology import NAMED_TOPOLOGIES, Role, Topology

NODES = st.lists(st.sampled_from(NAMED_TOPOLOGIES), min_size=1, max_size=1).map(
    lambda names: Topology.parse(names[0]).nodes
)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)


@given(specs=NODES, ca_file=st.none() | TEXT, key=st.none() | TEXT)
def test_a_written_cluster_reads_back_equal(tmp_path_factory, specs, ca_file, key):
    """``read_cluster(write_cluster(spec)) == spec``, whatever stands in the text fields."""
    path = tmp_path_factory.mktemp("cluster") / "cluster.toml"
    spec = ClusterSpec(
        tuple(
            Node(s.name, s.role, f"http://127.0.0.1:{8101 + i}", api_key_env=key, ca_file=ca_file)
            for i, s in enumerate(specs)
        )
    )

    write_cluster(spec, path)

    assert read_cluster(path) == spec


def test_a_hand_written_file_needs_only_name_role_and_url(tmp_path):
    """The metrics address defaults to the node's own /metrics; a trailing slash is dropped."""
    path = tmp_path / "cluster.toml"
    path.write_text('[[node]]\nname="r0"\nrole="R"\nurl="http://host:8000/"\n')

    node = read_cluster(path)["r0"]

    assert (node.role, node.url, node.metrics_url) == (
        Role.R, "http://host:8000", "http://host:8000/metrics",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("", r"no \[\[node\]\]"),
        ("[[node", "cannot be read"),
        ('[[node]]\nname="a"\nrole="R"', "missing"),
        ('[[node]]\nname="a"\nrole="X"\nurl="http://a:1"', "roles are"),
        ('[[node]]\nname="a"\nrole="R"\nurl="a:1"', "not http"),
        ('[[node]]\nname="a"\nrole="R"\nurl="http://a:1"\nport=3', "unknown"),
        ('[[node]]\nname="a"\nrole="R"\nurl="http://a:99999"', "not http"),
        ('[[node]]\nname="a"\nrole="R"\nurl="http://a:1?x=1"', "without a path"),
        ('[[node]]\nname="a"\nrole="R"\nurl="http://a:1"\nmetrics_url="a:1/m"', "metrics_url"),
        ('[[node]]\nname="a"\nrole="R"\nurl="http://user:key@a:1"', "not http"),
        ('[[node]]\nname="a"\nrole="R"\nurl="http://a..b:1"', "not http"),
        ('[[node]]\nname="a\\r\\nx: y"\nrole="R"\nurl="http://a:1"', "can be printed"),
        (
            "".join(f'[[node]]\nname="{name}"\nrole="R"\nurl="http://a:1"\n' for name in "ab"),
            "http://a:1 stands for two nodes",
        ),
        ('[[node]]\nname="bad"\nrole="X"\nurl="http://a:1"', "cluster.toml, node 'bad'"),
        *(
            (f'[[node]]\nname="a"\nrole="R"\nurl="http://a:1"\nkv_events="{address}"', "kv_events")
            for address in ("tcp://*:5557", "tcp://a", "http://a:1", "a:1", "ipc://", "tcp://a:x")
        ),
        ("node = [3]", r"no \[\[node\]\]"),
        ('[[node]]\nname="a"\nrole="D"\nurl="http://a:1"', "P is present exactly"),
        ('[[node]]\nname="a"\nrole="R"\nurl="http://a:1"\n' * 2, "unique"),
    ],
)
def test_a_wrong_cluster_file_is_refused_with_its_reason(tmp_path, text, word):
    """What is wrong stands in the message."""
    path = tmp_path / "cluster.toml"
    path.write_text(text)

    with pytest.raises(UsageError, match=word):
        read_cluster(path)


def test_a_cluster_file_that_is_no_text_is_refused(tmp_path):
    """Bytes that are not UTF-8 are a sentence too."""
    path = tmp_path / "cluster.toml"
    path.write_bytes(b"\xff\xfe")

    with pytest.raises(UsageError, match="cannot be read"):
        read_cluster(path)


@pytest.mark.parametrize("key", ["a\nb", "ключ"])
def test_a_key_that_no_header_carries_is_refused_and_not_shown(monkeypatch, key):
    """A secret file's line break is the usual one; the message names the variable alone."""
    monkeypatch.setenv("PPD_TEST_KEY", key)

    with pytest.raises(UsageError, match=r"\$PPD_TEST_KEY holds a line break") as error:
        Node("r0", Role.R, "http://a:1", api_key_env="PPD_TEST_KEY").headers()
    assert key not in str(error.value)


def test_a_certificate_file_that_is_not_there_is_named(tmp_path):
    """So is one that holds no certificate."""
    empty = tmp_path / "empty.pem"
    empty.write_text("nothing")

    for file in (str(tmp_path / "none.pem"), str(empty)):
        with pytest.raises(UsageError, match=f"'r0': ca_file '{file}' cannot be used"):
            Node("r0", Role.R, "https://a:1", ca_file=file).tls()


def test_a_missing_cluster_file_says_how_to_get_one(tmp_path):
    """The message names the command that writes it."""
    with pytest.raises(UsageError, match="ppd cluster up"):
        read_cluster(tmp_path / "none.toml")


def test_the_api_key_comes_from_the_environment(monkeypatch):
    """The file names a variable; an unset one is an error that names it."""
    node = Node("r0", Role.R, "http://a:1", api_key_env="PPD_TEST_KEY")
    monkeypatch.setenv("PPD_TEST_KEY", "secret")
    assert node.headers() == {"Authorization": "Bearer secret"}

    monkeypatch.delenv("PPD_TEST_KEY")
    with pytest.raises(UsageError, match="PPD_TEST_KEY"):
        node.headers()


def test_nodes_from_options_are_named_by_role_in_order():
    """``--node P=… --node D=… --node D=…`` is a 1P_2D with names p0, d0, d1."""
    spec = cluster_from_options(["P=http://a:1", "D=http://b:1", "D=http://c:1"])

    assert [node.name for node in spec.nodes] == ["p0", "d0", "d1"]
    assert str(spec.topology) == "1P_2D"
