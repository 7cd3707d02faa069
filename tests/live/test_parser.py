from __future__ import annotations

import json
import subprocess

from ppdbench.cluster.launch import LaunchOptions, planned_commands
from ppdbench.cluster.vllm_args import Device
from ppdbench.core.topology import Topology

PARSE = """
import json, sys
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ImportError:  # where older vLLM has it
    from vllm.entrypoints.openai.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
parsed = []
for argv in json.load(sys.stdin):
    args = parser.parse_args(argv)
    kv = args.kv_transfer_config
    parsed.append([args.model, args.port, args.enable_prefix_caching,
                   args.enable_prompt_tokens_details, args.tensor_parallel_size,
                   kv and [kv.kv_connector, kv.kv_role, kv.kv_connector_extra_config]])
print("PARSED" + json.dumps(parsed))
"""


def test_vllms_own_parser_reads_our_arguments_as_we_mean_them(engine_python):
    """Not one unknown flag on either device, and each value arrives where it belongs."""
    shape = Topology.parse("1R_1P_1D_1pD")
    cuda = LaunchOptions(model="m", gpus=("0", "1", "2", "3"), dummy_weights=True,
                         max_model_len=4096)  # fmt: skip
    cpu = LaunchOptions(device=Device.CPU, pull=True, lease_s=12)
    commands = [*planned_commands(shape, cuda), *planned_commands(shape, cpu)]
    argvs = [list(command.argv[3:]) for command in commands]

    done = subprocess.run(
        [engine_python, "-c", PARSE], input=json.dumps(argvs), capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    parsed = json.loads(done.stdout.rpartition("PARSED")[2])

    assert [row[2:5] for row in parsed] == [[True, True, 1]] * len(commands)
    assert [row[1] for row in parsed[:4]] == [8101, 8102, 8103, 8104]
    assert {row[0] for row in parsed[:4]} == {"m"}
    roles = [row[5] and row[5][1] for row in parsed]
    assert roles == [None, "kv_producer", "kv_consumer", "kv_consumer"] * 2
    assert parsed[5][5][2]["kv_lease_duration"] == 12
    assert parsed[6][5][2]["bidirectional_kv_xfer"] is True
