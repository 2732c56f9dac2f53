"""Public accelerators and CPUs, for planning on a machine one does not have. Every value has its source.

Peaks are dense (vendors like to print twice as much, for sparse matrices) and at the boost clock of the data sheet; of CPUs
they are cores x base clock x operations a cycle and core. Bandwidths are the data sheet's, which no program reaches whole:
about 80 to 92 % of it can be read. Links are one way (vendors print both ways together). Prices are list prices for one device
or socket, on demand, and move.
"""
from __future__ import annotations

from collections.abc import Mapping

from ridgeline.analysis.hardware import Hardware
from ridgeline.errors import ConfigError

T, G = 1e12, 1e9
NVLINK_LATENCY_S = 3e-6            # of one message between two devices, hops and launch included
PCIE_LATENCY_S = 8e-6
LATENCY_SOURCE = "order of magnitude of small all-reduces in public NCCL benchmarks (github.com/NVIDIA/nccl-tests)"
RUNPOD = "docs.runpod.io/serverless/pricing, active worker, dollars a second x 3600"
AWS = "aws.amazon.com/ec2/pricing/on-demand, us-east-1"

H100_PEAKS = {"float32": 66.9 * T, "tf32": 494.7 * T, "bfloat16": 989.4 * T, "float16": 989.4 * T, "fp8": 1978.9 * T,
              "int8": 1978.9 * T}
A100_PEAKS = {"float32": 19.5 * T, "tf32": 156 * T, "bfloat16": 312 * T, "float16": 312 * T, "int8": 624 * T, "int4": 1248 * T}


def _gpu(name: str, sheet: str, *, memory: float, bandwidth: float, peaks: Mapping[str, float], link: float | None = None,
         nvlink: bool = False, link_of: str = "", price: float | None = None, price_of: str = "") -> Hardware:
    """memory in bytes, bandwidth and link (one way) in bytes a second; sheet: source of what has no other."""
    sources = {"peaks": f"{sheet}; dense", "bandwidth": sheet, "memory_bytes": sheet}
    if link is not None:
        sources |= {"link_bandwidth": link_of or f"{sheet}; half of both ways together", "link_latency_s": LATENCY_SOURCE}
    if price is not None:
        sources["price_per_hour"] = price_of
    latency = 0.0 if link is None else NVLINK_LATENCY_S if nvlink else PCIE_LATENCY_S
    return Hardware(name, bandwidth, dict(peaks), int(memory), device="gpu", link_bandwidth=link, link_latency_s=latency,
                    price_per_hour=price, sources=sources)


def _cpu(name: str, sheet: str, *, cores: int, clock: float, cycle: Mapping[str, int], units: str, channels: int,
         transfers: float, memory: float, price: float | None = None, price_of: str = "") -> Hardware:
    """clock: base, Hz; cycle: operations a cycle and core, as the vendor's `units` give them; transfers: of a memory channel of
    8 bytes, a second; memory: bytes that such a socket commonly has."""
    sources = {"peaks": f"{sheet}: {cores} cores x {clock / 1e9:g} GHz; {units}",
               "bandwidth": f"{sheet}: {channels} channels x {transfers / 1e6:g} MT/s x 8 bytes",
               "memory_bytes": f"{memory / G:g} GB, a common configuration"}
    if price is not None:
        sources["price_per_hour"] = price_of
    peaks = {compute: cores * clock * each for compute, each in cycle.items()}
    return Hardware(name, 8 * channels * transfers, peaks, int(memory), threads=cores, price_per_hour=price, sources=sources)


_ZEN4 = {"float32": 32, "bfloat16": 64, "int8": 128}
_ZEN4_UNITS = "AVX-512 on two 256-bit multiply-add pipes, VNNI, BF16 (Software Optimization Guide for Zen 4, AMD 57647)"
_ZEN5 = {"float32": 64, "bfloat16": 128, "int8": 256}
_ZEN5_UNITS = "AVX-512 on two 512-bit multiply-add pipes (Software Optimization Guide for Zen 5, AMD 58455)"
_AMX = {"float32": 64, "bfloat16": 1024, "int8": 2048}
_AMX_UNITS = "two AVX-512 multiply-add pipes; AMX tiles (Intel 64 and IA-32 Optimization Reference Manual, 248966)"
_PCIE4, _PCIE4_OF = 31.5 * G, "PCI Express 4.0 x16, one way"

_MACHINES = (
    _gpu("H100", "NVIDIA H100 Tensor Core GPU data sheet, H100 SXM", memory=80 * G, bandwidth=3350 * G, peaks=H100_PEAKS,
         link=450 * G, nvlink=True, price=3.35, price_of=RUNPOD),
    _gpu("H100-PCIe", "NVIDIA H100 Tensor Core GPU data sheet, H100 PCIe", memory=80 * G, bandwidth=2000 * G,
         peaks={"float32": 51 * T, "tf32": 378 * T, "bfloat16": 756 * T, "float16": 756 * T, "fp8": 1513 * T, "int8": 1513 * T},
         link=300 * G, nvlink=True, price=2.49, price_of="lambda.ai/pricing, one H100 PCIe"),
    _gpu("H200", "NVIDIA H200 Tensor Core GPU data sheet, H200 SXM", memory=141 * G, bandwidth=4800 * G, peaks=H100_PEAKS,
         link=450 * G, nvlink=True, price=4.46, price_of=RUNPOD),
    _gpu("B200", "NVIDIA HGX B200 data sheet, one of eight", memory=180 * G, bandwidth=7700 * G, link=900 * G, nvlink=True,
         peaks={"float32": 75 * T, "tf32": 1100 * T, "bfloat16": 2250 * T, "float16": 2250 * T, "fp8": 4500 * T,
                "int8": 4500 * T, "fp4": 9000 * T}, price=6.84, price_of=RUNPOD),
    _gpu("A100-40GB", "NVIDIA A100 Tensor Core GPU data sheet, 40 GB", memory=40 * G, bandwidth=1555 * G, peaks=A100_PEAKS,
         link=300 * G, nvlink=True, price=1.84, price_of="aws.amazon.com/ec2/capacityblocks/pricing, p4d.24xlarge / 8"),
    _gpu("A100-80GB", "NVIDIA A100 Tensor Core GPU data sheet, 80 GB SXM", memory=80 * G, bandwidth=2039 * G, peaks=A100_PEAKS,
         link=300 * G, nvlink=True, price=2.16, price_of=RUNPOD),
    _gpu("L40S", "NVIDIA L40S data sheet", memory=48 * G, bandwidth=864 * G, link=_PCIE4, link_of=_PCIE4_OF,
         peaks={"float32": 91.6 * T, "tf32": 183 * T, "bfloat16": 362.05 * T, "float16": 362.05 * T, "fp8": 733 * T,
                "int8": 733 * T, "int4": 733 * T}, price=1.33, price_of=RUNPOD),
    _gpu("L4", "NVIDIA L4 data sheet", memory=24 * G, bandwidth=300 * G, link=_PCIE4, link_of=_PCIE4_OF,
         peaks={"float32": 30.3 * T, "tf32": 60 * T, "bfloat16": 121 * T, "float16": 121 * T, "fp8": 242.5 * T,
                "int8": 242.5 * T}, price=0.47, price_of=RUNPOD),
    _gpu("T4", "NVIDIA T4 data sheet", memory=16 * G, bandwidth=300 * G, link=15.75 * G, link_of="PCI Express 3.0 x16, one way",
         peaks={"float32": 8.1 * T, "float16": 65 * T, "int8": 130 * T, "int4": 260 * T}, price=0.526,
         price_of=f"{AWS}, g4dn.xlarge"),
    _gpu("RTX-4090", "NVIDIA Ada GPU architecture white paper, GeForce RTX 4090, fp32 accumulation", memory=24 * G,
         bandwidth=1008 * G, link=_PCIE4, link_of=_PCIE4_OF,
         peaks={"float32": 82.6 * T, "tf32": 82.6 * T, "bfloat16": 165.2 * T, "float16": 165.2 * T, "fp8": 330.3 * T,
                "int8": 660.6 * T, "int4": 1321.2 * T}, price=0.76, price_of=RUNPOD),
    _gpu("RTX-3090", "NVIDIA Ampere GA102 GPU architecture white paper, GeForce RTX 3090, fp32 accumulation", memory=24 * G,
         bandwidth=936 * G, link=_PCIE4, link_of=_PCIE4_OF,
         peaks={"float32": 35.6 * T, "tf32": 35.6 * T, "bfloat16": 71 * T, "float16": 71 * T, "int8": 284 * T, "int4": 568 * T},
         price=0.47, price_of=RUNPOD),
    _gpu("MI300X", "AMD Instinct MI300X accelerator data sheet", memory=192 * G, bandwidth=5300 * G, link=448 * G, nvlink=True,
         link_of="AMD Instinct MI300X data sheet: seven Infinity Fabric links of 128 GB/s both ways; half of it",
         peaks={"float32": 163.4 * T, "tf32": 653.7 * T, "bfloat16": 1307.4 * T, "float16": 1307.4 * T, "fp8": 2614.9 * T,
                "int8": 2614.9 * T}, price=1.85, price_of="vultr.com/pricing, one MI300X of eight"),
    _gpu("M1-Max", "Apple newsroom, 18 October 2021: M1 Max, 32-core GPU, 10.4 teraflops, 400 GB/s, 64 GB", memory=64 * G,
         bandwidth=400 * G, peaks={"float32": 10.4 * T}),
    _gpu("M1-Ultra", "Apple newsroom, 8 March 2022: M1 Ultra, 64-core GPU, 21 teraflops, 800 GB/s, 128 GB", memory=128 * G,
         bandwidth=800 * G, peaks={"float32": 21 * T}),
    _gpu("M2-Ultra", "Apple newsroom, 5 June 2023: M2 Ultra, 76-core GPU, 27.2 teraflops, 800 GB/s, 192 GB",
         memory=192 * G, bandwidth=800 * G, peaks={"float32": 27.2 * T}),
    _cpu("EPYC-9654", "AMD EPYC 9654 product page", cores=96, clock=2.4e9, cycle=_ZEN4, units=_ZEN4_UNITS, channels=12,
         transfers=4800e6, memory=768 * G, price=4.93, price_of=f"{AWS}, c7a.48xlarge / 2: two sockets of a Genoa of its own"),
    _cpu("EPYC-9755", "AMD EPYC 9755 product page", cores=128, clock=2.7e9, cycle=_ZEN5, units=_ZEN5_UNITS, channels=12,
         transfers=6000e6, memory=768 * G),
    _cpu("EPYC-7763", "AMD EPYC 7763 product page", cores=64, clock=2.45e9, cycle={"float32": 32, "int8": 64},
         units="AVX2 on two 256-bit multiply-add pipes; VPMADDUBSW and VPMADDWD for int8 (Software Optimization Guide for Zen "
               "3, AMD 56665)", channels=8, transfers=3200e6, memory=512 * G),
    _cpu("Xeon-8380", "Intel Xeon Platinum 8380 product page", cores=40, clock=2.3e9, cycle={"float32": 64, "int8": 256},
         units="two AVX-512 multiply-add pipes, VNNI (Intel 64 and IA-32 Optimization Reference Manual, 248966)", channels=8,
         transfers=3200e6, memory=512 * G),
    _cpu("Xeon-8480+", "Intel Xeon Platinum 8480+ product page", cores=56, clock=2.0e9, cycle=_AMX, units=_AMX_UNITS,
         channels=8, transfers=4800e6, memory=512 * G, price=4.28,
         price_of=f"{AWS}, c7i.48xlarge / 2: two sockets of a Sapphire Rapids of its own"),
    _cpu("Xeon-6980P", "Intel Xeon 6980P product page", cores=128, clock=2.0e9, cycle=_AMX, units=_AMX_UNITS, channels=12,
         transfers=8800e6, memory=768 * G),
    _cpu("Ryzen-7950X", "AMD Ryzen 9 7950X product page", cores=16, clock=4.5e9, cycle=_ZEN4, units=_ZEN4_UNITS, channels=2,
         transfers=5200e6, memory=64 * G),
    _cpu("Ryzen-9950X", "AMD Ryzen 9 9950X product page", cores=16, clock=4.3e9, cycle=_ZEN5, units=_ZEN5_UNITS, channels=2,
         transfers=5600e6, memory=64 * G),
)
HARDWARE: dict[str, Hardware] = {machine.name: machine for machine in _MACHINES}
ALIASES = {"H100-SXM": "H100", "H200-SXM": "H200", "A100": "A100-80GB", "4090": "RTX-4090", "3090": "RTX-3090"}


def hardware(name: str) -> Hardware:
    """A machine of the table by its name; case does not matter, blanks are hyphens. raises ConfigError with all names."""
    known = {key.lower(): key for key in HARDWARE} | {alias.lower(): key for alias, key in ALIASES.items()}
    found = known.get(name.strip().lower().replace("_", "-").replace(" ", "-"))
    if found is None:
        raise ConfigError(f"hardware {name!r} is not in the table; it has {', '.join(HARDWARE)}")
    return HARDWARE[found]
