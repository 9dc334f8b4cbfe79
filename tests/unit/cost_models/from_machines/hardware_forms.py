"""Hardware files of other planners, kept small, after those of ai-dynamo/aiconfigurator and AMD-AGI/Primus."""

from __future__ import annotations


def system(
    name: str,
    mem_bw: int = 3_350_000_000_000,
    capacity: int = 85_899_345_920,
    rate: str = "bfloat16_tc_flops: 989000000000000",
    count: int = 8,
    inside: int = 450_000_000_000,
    between: int = 50_000_000_000,
) -> str:
    """Write a system of AIConfigurator."""
    return (
        f"data_dir: data/{name} # relative to systems_dir\n"
        f"gpu:\n  mem_bw: {mem_bw}\n  mem_bw_empirical_scaling_factor: 0.8 # nonofficial\n  mem_capacity: {capacity}\n"
        f"  {rate}\n  fp8_tc_flops: 1978000000000000\n  sm_version: 90\n"
        f"node:\n  num_gpus_per_node: {count}\n  inter_node_bw: {between}\n"
        f"  intra_node_bw: {inside}\n  p2p_latency: 0.00001\n"
        "misc:\n  nccl_mem:\n    1: 0\n    2: 358612992\n    4: 411041792\n    8: 411041792\n  other_mem: 3758096384\n"
    )


PRIMUS = """\
hardware_config:
  node_bw: 537.6
  node_lat: 0.45
  pod_bw: 50.0
  pod_lat: 2.0
  cluster_bw: 25.0
  node_size: 8
  pod_size: 64
  nics_per_node: 8
  switch_topology: false
  node_topology: mesh
  vector_flops: 157e12
"""
TARGET = """\
target_cluster:
  name: mine
  num_nodes: 2
  gpus_per_node: 8
  gpu_arch: mi300x
  hardware_config: {node_bw: 448.0, node_lat: 1, pod_bw: 48.0, pod_lat: 2.0, bw_eff: 0.88, nics_per_node: 8}
"""
G = 1_000_000_000

FILES: dict[str, tuple[str, str, int, float]] = {
    "h100_sxm.yaml": (system("h100_sxm"), "H100-80GB", 8, 450e9),
    "h800_sxm.yaml": (system("h800_sxm", inside=200 * G), "H800-80GB", 8, 200e9),
    "h200_sxm_halfbw.yaml": (
        system("h200_sxm", 2400 * G, 151_397_597_184, inside=225 * G, between=12_500_000_000),
        "H200-141GB",
        8,
        225e9,
    ),
    "a100_sxm.yaml": (
        system("a100_sxm", 2039 * G, rate="bfloat16_tc_flops: 312000000000000", inside=300 * G),
        "A100-80GB",
        8,
        300e9,
    ),
    "l40s.yaml": (
        system("l40s", 864 * G, 48_305_799_168, "float16_tc_flops: 362050000000000"),
        "L40S",
        8,
        450e9,
    ),
    "rtx_5090.yaml": (system("rtx_5090", 1792 * G, 34_190_917_632, count=1), "RTX5090", 1, 0),
    "rtx_pro_6000_server.yaml": (
        system("rtx_pro_6000_server", 1597 * G, 102_641_958_912, inside=64 * G),
        "RTXPRO6000",
        8,
        64e9,
    ),
    "b200_sxm.yaml": (system("b200_sxm", 7700 * G, 192_265_846_784, inside=900 * G), "B200", 8, 900e9),
    "h20_sxm.yaml": (system("h20_sxm", 4000 * G, 102_625_181_696), "H20-96GB", 8, 450e9),
    "gb10.yaml": (system("gb10", 273 * G, 128_000_000_000, count=1), "gb10", 1, 0),
    "mi355x.yaml": (PRIMUS, "MI355X", 8, 76.8e9),
    "mine.yaml": (TARGET, "MI300X", 8, 448e9 * 0.88),
    "mi325x.yaml": (
        "hardware_config:\n  node_bw: 448\n  node_lat: 0.5\n  node_size: 4\n",
        "MI325X",
        4,
        448e9,
    ),
}
"""By name: the file, the device, GPUs of a node, bandwidth from the first to the second."""
