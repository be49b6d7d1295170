"""``ring-backends plan`` prints the numbers of the cost model, reads probes, and names bad arguments."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import refused, run, shown
from test_cost_model import PLAIN, full

from ring_backends.cli.plan import parse_bytes, parse_hosts
from ring_backends.cost import local_probe
from ring_backends.cost.hardware import Hardware
from ring_backends.schedule.trees import MESSAGE_COST
from ring_backends.testing.marks import THOROUGH

GIVEN = "--latency 1e-3 --bandwidth 1e9 --flops 1e9"
SIZES = "--seq-len 4096 --ring-size 4 --heads 2 --head-dim 4 --dtype fp32"


def planned(tmp_path: Path, arguments: str, *more: Any) -> tuple[dict[str, Any], str]:
    """Run ``plan``. Returns the content of the --json file, and the printed text."""
    text = shown(f"plan {arguments}", *more, "--json", tmp_path / "plan.json")
    return json.loads((tmp_path / "plan.json").read_text()), text


def test_the_command_prints_the_numbers_of_the_model(tmp_path: Path) -> None:
    pattern = "--segment-lengths 4096 --dilation-rates 1 --no-causal"
    found, text = planned(tmp_path, f"{SIZES} {pattern} --buffer-bytes 0 --memory 1GB {GIVEN}")
    cost, hardware = full(4096, 4), replace(PLAIN, backward_flops_per_second=1e9)
    assert Hardware.of(found["hardware"]) == hardware
    seconds = {name: cost.call_seconds(hardware, backward=name == "backward") for name in ("forward", "backward")}
    assert found["ring"]["seconds"] == pytest.approx(seconds)
    assert found["ring"]["memory_bytes"] == max(found["per_rank"]["memory_bytes"]) == int(cost.memory_bytes.max())
    assert found["per_rank"]["bytes_sent"]["backward"] == cost.sent_bytes(backward=True).tolist()
    assert found["pays"] is True
    alone = sum(found["one_device"]["seconds"].values())
    assert found["speedup"] == pytest.approx(alone / sum(seconds.values()))
    assert found["smallest_ring"] == {"fits": 1, "fits_and_pays": 2}
    assert [size["ring_size"] for size in found["ring_sizes"]] == [1, 2, 4, 8, 16, 32, 64]
    for part in ("4,096 tokens, contiguous, ring of 4", "total memory", "Constants as given.", "sent forward"):
        assert part in text
    last = text.strip().splitlines()[-1]
    assert last.startswith("At 4,096 tokens a ring of 4 pays:")
    fits, pays = "ring that fits into 953.7 MiB per rank has 1 rank", "that fits and pays has 2 ranks."
    assert f"the smallest {fits}, and the smallest {pays}" in last


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--seq-len 16 --ring-size 2", "At 16 tokens a ring of 2 does not pay"),
        ("--seq-len 64 --ring-size 1", "At 64 tokens a ring of 1 is one device, which takes"),
        ("--seq-len 64 --ring-size 2 --memory 10B", "no ring fits into 10 bytes per rank."),
        ("--seq-len 16 --ring-size 2 --memory 9MB", "has 1 rank, and none that fits pays."),
        ("--seq-len 99999 --ring-size 2 --memory 50MiB", "ranks, and pays."),
    ],
)
def test_the_sentence_of_the_verdict(arguments: str, sentence: str) -> None:
    assert sentence in shown(f"plan {arguments} {GIVEN}")


def test_the_host_of_a_gpu_takes_time_for_tiles_and_hops(tmp_path: Path) -> None:
    """This machine needs no GPU, if all constants are given."""
    arguments = f"{SIZES} --segment-lengths 4096 --dilation-rates 1 --no-causal --device cuda"
    instant = "--latency 1e-9 --bandwidth 1e30 --flops 1e30"
    found, text = planned(tmp_path, f"{arguments} {instant}")
    assert "Constants as given, tile_seconds = 120 µs and post_seconds = 200 µs by default." in text
    # Two tiles and one hop to three others. K and V of all ranks are in memory, or with dK and dV in a backward.
    assert found["ring"]["seconds"]["forward"] == pytest.approx(2 * 120e-6 + (1 + 2 * MESSAGE_COST) * 200e-6)
    assert found["ring"]["communication_bytes"] == 4 * 4096 * 2 * 4 * 4
    found, text = planned(tmp_path, f"{arguments} {instant} --tile-seconds 0 --post-seconds 1e-3 --buffer-bytes 0")
    assert "Constants as given." in text
    assert found["ring"]["seconds"]["forward"] == pytest.approx(3e-3)  # three hops along a chain
    assert "--post-seconds" in refused(f"plan {arguments} {instant} --post-seconds -1")


def test_windows(tmp_path: Path) -> None:
    found, text = planned(tmp_path, f"{SIZES} --segment-lengths none --dilation-rates 1 --window-lengths 257 {GIVEN}")
    assert "│ 4,096 │ 257 │ 1 │ 2 │" in " ".join(text.split())
    assert (found["options"]["segment_lengths"], found["options"]["window_lengths"]) == ([None], [257])
    sent = 256 * 2 * (4 + 4) * 4  # the keys and values of 256 positions, which the next rank needs
    assert found["per_rank"]["bytes_sent"]["forward"] == [sent, sent, sent, 0]


def test_hosts(tmp_path: Path) -> None:
    arguments = f"--seq-len 4096 --ring-size 2 {GIVEN}"
    found, text = planned(tmp_path, f"{arguments} --hosts a,b,a,b")
    assert found["bytes_between_hosts"]["topology"] == 0
    each_ring = sum(map(sum, found["per_rank"]["bytes_sent"].values()))
    # In a ring of two, all bytes cross between hosts. K and V cross once more in backward, as bytes_sent counts.
    assert found["bytes_between_hosts"]["rank"] == 2 * each_ring
    assert 'and 0 bytes with ring_order="topology"' in text
    found, _ = planned(tmp_path, f"{arguments} --ranks-per-host 1")
    assert found["bytes_between_hosts"] == {"rank": each_ring, "topology": each_ring}


@pytest.mark.parametrize(
    ("arguments", "group_size"),
    [
        ("--ring-size 16 --ranks-per-host 8", 8),
        ("--ring-size 16 --ranks-per-host 8 --heads 12", 4),
        ("--ring-size 12 --ranks-per-host 8", 4),  # the last host has four ranks
        ("--ring-size 4 --hosts a,a,a,a,b,b,c,c", 2),  # two rings
        ("--ring-size 4 --hosts a,b,a,b", 1),
    ],
)
def test_groups_of_the_ranks_of_a_host(arguments: str, group_size: int) -> None:
    text = shown(f"plan --seq-len 4096 {GIVEN} --ulysses-size auto {arguments}")
    found = re.search(r"ring of \d+(?: in groups of (\d+))?", text)
    assert found is not None
    assert int(found[1] or 1) == group_size


@pytest.mark.parametrize(("hosts", "host_latency"), [("a,a,b,b", 1e-5), ("a,b,a,b", None)])
def test_exchanges_within_hosts_have_links_of_their_own(hosts: str, host_latency: float | None, tmp_path: Path) -> None:
    """Where a group lies on several hosts, its exchanges use the same links as hops."""
    call = f"{SIZES} --segment-lengths 4096 --dilation-rates 1 --no-causal --buffer-bytes 0 --ulysses-size 2"
    links = "--host-latency 1e-5 --host-bandwidth 1e11"
    found, _ = planned(tmp_path, f"{call} {GIVEN} {links} --hosts {hosts}")
    bandwidth = None if host_latency is None else 1e11
    hardware = Hardware.of(found["hardware"])
    assert (hardware.host_latency_seconds, hardware.host_bytes_per_second) == (host_latency, bandwidth)
    cost = replace(full(4096, 1), ulysses_size=2).on_ring(4)
    assert found["ring"]["seconds"]["forward"] == pytest.approx(cost.call_seconds(hardware))


def test_a_probe_is_read(tmp_path: Path) -> None:
    hardware = replace(PLAIN, memory_bytes=10**9)
    measured = {"dtype": "bfloat16", "head_dim": 64, "kernel": "aten_cpu_flash", "ranks": 2, "transport": "gloo"}
    probe = {"hardware": asdict(hardware), **measured, "device": "CPU with 1 thread per rank", "device_type": "cpu"}
    file = tmp_path / "probe.json"
    file.write_text(json.dumps({"probe": probe}))
    arguments = "--seq-len 4096 --ring-size 2"
    found, text = planned(tmp_path, f"{arguments} --dtype bf16 --latency 0.5 --probe", file)
    assert Hardware.of(found["hardware"]) == replace(hardware, latency_seconds=0.5)
    assert found["memory_bytes_per_rank"] == 10**9
    assert "bfloat16, head dim 64, kernel aten_cpu_flash, latency as given." in text
    found, _ = planned(tmp_path, f"{arguments} --dtype bf16 --flops 3e9 --probe", file)
    rates = {"forward_flops_per_second": 3e9, "backward_flops_per_second": 3e9}
    assert Hardware.of(found["hardware"]) == replace(hardware, **rates)
    long = "--seq-len 1048576 --segment-lengths 1048576 --dilation-rates 1 --ring-size 8 --dtype bf16 --probe"
    on_cpu, _ = planned(tmp_path, long, file)
    file.write_text(json.dumps({"probe": probe | {"device_type": "cuda"}}))
    on_gpu, _ = planned(tmp_path, long, file)
    assert on_gpu["ring"]["communication_bytes"] > on_cpu["ring"]["communication_bytes"]
    assert "the probe is of 'cuda'" in refused(f"plan --device cpu {long}", file)
    assert re.search("--probe.*measured in bfloat16", refused(f"plan {arguments} --dtype fp32 --probe", file))
    file.write_text("{}")
    assert "holds no constants" in refused(f"plan {arguments} --probe", file)


@pytest.mark.matrix(reason="probes the machine")
def test_plan_reads_or_takes_the_probes_of_info(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "info.json"
    text = shown("info --verbose --probe --dtype fp32 --json", file)
    for title in ("Versions", "Devices", "Adapters", "Kernels", "Which dtype", "How a hop travels", "Two local ranks"):
        assert title in text
    assert "NCCL" in text.partition("How a hop travels")[2].partition("Two local ranks")[0]
    assert "Constants for plan" in text
    written = json.loads(file.read_text())
    assert written["adapters"]["native"] is None
    assert written["kernels"]["math"]["unusable"] is None
    assert written["nccl"]["release"] is None or written["nccl"]["settings"]
    assert written["devices"][0] | {"name": ""} == {"device": "cpu", "name": "", "dtype": "float32"}
    probe = written["probe"]
    hardware = Hardware.of(probe["hardware"])
    assert 0 < hardware.latency_seconds < 10
    assert hardware.bytes_per_second > 1e6
    assert (probe["ranks"], probe["dtype"], probe["head_dim"], probe["kernel"]) == (2, "float32", 64, "aten_cpu_flash")
    assert hardware.memory_bytes > 2**20
    assert hardware.tile_seconds == 0
    for backward in (False, True):
        for causal in (False, True):
            flops, row_keys = hardware.tile_rate(backward=backward, causal=causal)
            assert 1e8 < flops < 1e13
            assert 0 <= row_keys < 1e5
    found, _ = planned(tmp_path, "--seq-len 4096 --ring-size 2 --dtype fp32 --probe", file)
    assert Hardware.of(found["hardware"]) == hardware
    measured: list[Any] = []
    monkeypatch.setattr(local_probe, "measure", lambda *args: measured.append(args) or probe)
    found, text = planned(tmp_path, "--seq-len 4096 --ring-size 512 --dtype fp32")
    assert "Constants measured just now: 2 ranks at once, gloo" in text
    assert measured == [(2, "float32", "auto", 64)]
    assert (found["probe"], found["memory_bytes_per_rank"]) == (probe, hardware.memory_bytes)


@pytest.mark.parametrize(
    ("arguments", "option", "message"),
    [
        ("--ring-size 0", "--ring-size", "Invalid value"),
        ("--heads 6 --kv-heads 4", "--kv-heads", "must divide the 6"),
        ("--dtype int8", "--dtype", "'int8'"),
        ("--layout spiral", "--layout", "'spiral'"),
        ("--memory much", "--memory", "'much'"),
        ("--memory 80", "--memory", "80 bytes, as there is no unit; 80GiB?"),
        (f"--memory {'9' * 400}GB", "--memory", "must be below 2**62 bytes"),
        ("--ring-size 65537", "--ring-size", "65536"),
        ("--heads 65537", "--heads", "65536"),
        ("--segment-lengths 65536 --dilation-rates 65536 --offset every", "dilation_rates = [65536]", "65,536 heads"),
        ("--seq-len 1000000000000000", "--seq-len", "have 1.6e+19 bytes; give less"),
        ("--head-dim 1000000000000000000", "head_dim = 1000000000000000000", "give less than 2.9e+17"),
        ("--batch-size 1000000000000000000", "batch = 1000000000000000000", "give less than 2.9e+17"),
        ("--latency 0", "--latency", "0.0"),
        ("--bandwidth -1", "--bandwidth", "-1.0"),
        ("--host-latency 0", "--host-latency", "0.0"),
        ("--host-bandwidth -1", "--host-bandwidth", "-1.0"),
        ("--ulysses-size 4", "--ulysses-size", "must divide the 2 ranks of the ring"),
        ("--ring-size 6 --ulysses-size 3", "--ulysses-size", "must divide the 8 query heads"),
        ("--ulysses-size auto", "--ulysses-size", "add --ranks-per-host or --hosts, or give a number"),
        ("--probe nowhere.json", "--probe", "'nowhere.json'"),
        ("--hosts a,b,a", "--hosts", "'a,b,a'"),
        ("--hosts a,b --ranks-per-host 1", "--hosts", "ranks_per_host is given too"),
        ("--segment-lengths 64", "--dilation-rates", "missing"),
        ("--window-lengths 8", "--window-lengths", "1 entries and segment_lengths has 3"),
        ("--json no/where/plan.json", "--json", "not a directory"),
    ],
)
def test_wrong_arguments_are_refused_by_name(arguments: str, option: str, message: str) -> None:
    error = refused(f"plan --seq-len 64 --ring-size 2 {GIVEN} {arguments}")
    assert option in error
    assert message in error


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("--ring-size 4 --memory 80B", "no ring fits into 80 bytes per rank."),
        ("--ring-size 4 --memory 80kB", "no ring fits into 78.1 KiB per rank."),
        # Fewer tokens per rank than the largest dilation rate, so that many ranks have no row.
        ("--ring-size 65536", "a ring of 65,536 pays"),
        ("--ring-size 65536 --buffer-bytes 0", "a ring of 65,536 does not pay"),
    ],
)
def test_extreme_rings_are_counted_in_seconds(arguments: str, sentence: str) -> None:
    assert sentence in shown(f"plan --seq-len 131072 {GIVEN} {arguments}")


def test_seq_len_and_ring_size_have_to_be_given() -> None:
    for name, other in (("--seq-len", "--ring-size"), ("--ring-size", "--seq-len")):
        assert name in refused(f"plan {other} 64")


@THOROUGH
def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    shown(f"plan --seq-len 4096 --ring-size 8 --memory 1GB {GIVEN} --plot", tmp_path / "a.svg")
    assert "<svg" in (tmp_path / "a.svg").read_text()
    assert "--plot" in refused(f"plan --seq-len 64 --ring-size 2 {GIVEN} --plot", tmp_path / "a.docx")


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("80GB", 80 * 10**9),
        ("40 GiB", 40 * 2**30),
        ("1.5kib", 1536),
        ("1000000", 10**6),
        ("17B", 17),
        ("2TB", 2 * 10**12),
    ],
)
def test_sizes_with_units(text: str, size: int) -> None:
    assert parse_bytes("memory", text) == size


@pytest.mark.parametrize("text", ["", "GB", "1.2.3GB", "-1GB", "10 parsecs", "0", "."])
def test_invalid_sizes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^memory = "):
        parse_bytes("memory", text)


def test_parsing_the_hosts_of_ranks() -> None:
    assert parse_hosts("a, b a,b", None, 2) == ("a", "b", "a", "b")
    assert parse_hosts(None, 2, 5) == ("0", "0", "1", "1", "2")
    assert parse_hosts(None, None, 5) is None


def test_torch_is_imported_only_when_the_command_runs() -> None:
    code = "import sys, ring_backends.cli, ring_backends.cost.local_probe; sys.exit('torch' in sys.modules)"
    assert run(["-c", code], Path.cwd()).returncode == 0


def test_index_arithmetic_stays_on_the_cpu() -> None:
    with torch.device("meta"):
        assert float(full(64, 4).seconds(PLAIN).max()) > 0
        assert full(64, 4).schedule.bytes_between_hosts([0, 0, 1, 1], batch=1, head_dim=4, itemsize=4) > 0
