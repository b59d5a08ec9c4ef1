"""Each broken setup is found and named, with its exit status: from what nvidia-smi, the package index and JAX answer.

A `Machine` stands for the answers; everything that reads, judges and prints them is the real thing.
"""

import dataclasses
import json
import logging
import os
import stat
import subprocess
import sys
import types
from collections.abc import Callable, Mapping

import pytest

from jmoe import cli, compat, doctor, machine, selftest, support
from jmoe.doctor import diagnose, kernels
from jmoe.machine import Probes, gather

needs_new_jax = pytest.mark.skipif(not compat.KERNELS_SUPPORTED, reason="the kernels' own reasons ask for JAX >= 0.11")
PLUGIN = {"jax-cuda13-plugin": "0.11.2", "jax-cuda13-pjrt": "0.11.2", "nvidia-nccl-cu13": "2.28.3"}
PACKAGES = {"jmoe": "0.1.0", "jax": "0.11.2", "jaxlib": "0.11.2", "flax": "0.12.8", **PLUGIN}
IDLE = "580.65.06, {}, NVIDIA H200, 143771, 4, 0, Disabled"
NO_CUDA = RuntimeError("Unknown backend: 'cuda' requested, but no platforms that are instances of cuda are present.")


def gpu(i, capability="9.0", kind="NVIDIA H200"):
    return types.SimpleNamespace(platform="gpu", device_kind=kind, compute_capability=capability, local_hardware_id=i)


CPU = types.SimpleNamespace(platform="cpu", device_kind="cpu", local_hardware_id=0)


@dataclasses.dataclass(frozen=True)
class Machine:
    """A machine's answers, by default those of two healthy H200s."""

    smi: str = "\n".join(IDLE.format(i) for i in range(2))
    packages: Mapping[str, str] = dataclasses.field(default_factory=lambda: PACKAGES)
    devices: tuple = (gpu(0), gpu(1))
    cuda_error: Exception | None = None
    start_error: Exception | None = None
    log: Callable[[], None] = lambda: None
    access: Mapping | None = dataclasses.field(default_factory=lambda: dict.fromkeys([(0, 1), (1, 0)], (True, True)))
    mosaic_error: Exception | None = None
    python: str = "3.12.4"
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def probes(self):
        def devices(platform):
            self.log()
            error = self.start_error or (self.cuda_error if platform == "cuda" else None)
            if error:
                raise error
            return self.devices

        def mosaic():
            if self.mosaic_error:
                raise self.mosaic_error

        return Probes(
            python=lambda: self.python,
            package=self.packages.get,
            nvidia_smi=lambda: self.smi,
            devices=devices,
            peers=lambda ordinals: self.access,
            mosaic=mosaic,
            environ=self.env,
        )

    def facts(self):
        return gather(self.probes())


def packages(**versions):
    merged = PACKAGES | {k.replace("_", "-"): v for k, v in versions.items()}
    return {k: v for k, v in merged.items() if v is not None}


BARE = packages(**{name.replace("-", "_"): None for name in PLUGIN})
ON_CPU = dict(devices=(CPU,), cuda_error=NO_CUDA, access=None)


def troubles(m):
    return [f for f in diagnose(m.facts()) if f.level != "ok"]


def only(m, level):
    (finding,) = troubles(m)
    assert finding.level == level and finding.todo
    return f"{finding.what} | {finding.todo}"


def printed(m, capsys, monkeypatch, **options):
    """(exit status, the page with runs of white space as one blank) of `jmoe doctor --no-self-test`."""
    monkeypatch.setenv("COLUMNS", "200")
    status = cli.run_doctor(probes=m.probes(), self_test=False, **options)
    return status, " ".join(capsys.readouterr().out.split())


# --- the broken setups of which the doctor must know, down to the exit status


def old(version):
    names = ("jax", "jaxlib", "jax_cuda13_plugin", "jax_cuda13_pjrt")
    return packages(**dict.fromkeys(names, version))


BUSY = f"{IDLE.format(0)}\n580.65.06, 1, NVIDIA H200, 143771, 100000, 97, Disabled"
SETUPS = {
    "healthy": (Machine(), 0, "Nothing is wrong."),
    "no GPU": (Machine(smi="", packages=BARE, **ON_CPU), 0, "warning no GPU: nvidia-smi lists none"),
    "JAX without CUDA plugin": (
        Machine(packages=BARE, **ON_CPU),
        1,
        "problem JAX has no CUDA plugin: it runs on cpu beside 2 idle GPUs pip install 'jmoe[cuda13]'",
    ),
    "mismatched plugin": (
        Machine(packages=packages(jax_cuda13_plugin="0.11.0", jax_cuda13_pjrt="0.11.0"), **ON_CPU),
        1,
        "problem mismatched plugin: jax-cuda13-plugin is 0.11.0 and jaxlib is 0.11.2; JAX ignores it "
        "pip install 'jax[cuda13]==0.11.2'",
    ),
    "no peer access": (
        Machine(access=dict.fromkeys([(0, 1), (1, 0)], (False, False))),
        1,
        "problem no peer access between GPUs 0 -> 1, 1 -> 0: the one-sided kernels cannot run",
    ),
    "one GPU of two busy": (
        Machine(smi=BUSY),
        0,
        "warning 1 of 2 GPUs is in use by other processes: GPU 1 has 97.7 of 140 GiB in use and is 97 % busy. Memory "
        "may run out, and figures will vary CUDA_VISIBLE_DEVICES=0 leaves the free ones.",
    ),
    "JAX too old for kernels": (
        Machine(packages=old("0.10.2")),
        1,
        "problem JAX 0.10.2 is too old for the GPU kernels, which need 0.11: plain XLA runs in their place "
        "pip install -U 'jmoe[cuda13]'.",
    ),
    "JAX whose compiler drops setmaxnreg": (
        Machine(packages=old("0.12.0")),
        0,
        "warning JAX 0.12.0 compiles kernels with libnvJitLink, which keeps warpgroups from handing registers to each "
        "other: some grouped matmuls use smaller tiles than under JAX 0.11 pip install 'jax[cuda13]<0.12' for the "
        "tiles that the figures were measured with.",
    ),
}


@pytest.mark.parametrize("name", SETUPS)
def test_broken_setup(name, capsys, monkeypatch):
    if name == "healthy" and not compat.KERNELS_SUPPORTED:
        pytest.skip("the kernels' own reasons ask for JAX >= 0.11")
    m, expected, message = SETUPS[name]
    status, page = printed(m, capsys, monkeypatch)
    assert status == expected and message in page
    problems = page.count("problem ")
    assert bool(problems) == bool(expected) and ("does not work until it is mended" in page) == bool(expected)
    other = [text for n, (_, _, text) in SETUPS.items() if n not in (name, "healthy")]
    assert not any(text[:40] in page for text in other)  # and nothing else


@pytest.mark.parametrize("name", SETUPS)
def test_broken_setup_as_json(name, capsys):
    m, expected, message = SETUPS[name]
    assert cli.run_doctor(probes=m.probes(), self_test=False, as_json=True) == expected
    data = json.loads(capsys.readouterr().out)
    levels = {f["level"] for f in data["findings"]}
    assert data["status"] == expected == int("problem" in levels) and data["self_test"] == []


# --- details


def test_a_healthy_machine_has_nothing_to_report():
    assert not troubles(Machine())
    text = " ".join(f.what for f in diagnose(Machine().facts()))
    for part in ("2 GPUs (NVIDIA H200), driver 580.65.06", "JAX 0.11.2", "NVLink between all 2 GPUs", "NCCL 2.28.3"):
        assert part in text


def test_no_gpu_says_where_to_look():
    text = only(Machine(smi="", packages=BARE, **ON_CPU), "warning")
    assert "the same results and no speed" in text and "--gpus all" in text


def test_the_extra_fits_the_driver():
    m = Machine(smi=IDLE.format(0).replace("580.65.06", "550.54.15"), packages=BARE, **ON_CPU)
    text = only(m, "problem")
    assert "pip install 'jmoe[cuda12]' (driver 550.54.15 takes CUDA 12)" in text


def test_half_a_plugin_and_two_plugins():
    assert "jax-cuda13-pjrt is missing" in only(Machine(packages=packages(jax_cuda13_pjrt=None)), "problem")
    both = Machine(packages=packages(jax_cuda12_plugin="0.11.2", jax_cuda12_pjrt="0.11.2"))
    assert "CUDA 12 and 13 are both installed" in only(both, "problem")


def test_a_driver_that_is_too_old_for_the_plugin():
    text = only(Machine(smi=IDLE.format(0).replace("580.65.06", "550.54.15"), devices=(gpu(0),)), "problem")
    assert "driver 550.54.15 is too old for CUDA 13, which needs 580" in text and "'jmoe[cuda12]'" in text


def test_links_other_than_nvlink():
    pcie = Machine(access=dict.fromkeys([(0, 1), (1, 0)], (True, False)))
    assert "over PCIe, not NVLink" in only(pcie, "warning")
    assert "libcuda.so.1 could not be asked" in only(Machine(access=None), "warning")
    assert not troubles(Machine(smi=IDLE.format(0), devices=(gpu(0),), access=None))


def test_busy_gpus():
    both = only(Machine(smi=BUSY.replace("143771, 4, 0", "143771, 90000, 0")), "warning")
    assert "2 of 2 GPUs are in use" in both and "end the processes" in both
    assert not troubles(Machine(smi=BUSY.replace("100000, 97", "600, 3")))  # what a driver keeps for itself
    hidden = Machine(smi=BUSY, env={"CUDA_VISIBLE_DEVICES": "0"}, devices=(gpu(0),))
    assert not troubles(hidden)
    assert any("CUDA_VISIBLE_DEVICES=0 hides 1" in f.what for f in diagnose(hidden.facts()))


def test_versions_out_of_range():
    text = only(Machine(packages=old("0.10.2"), python="3.11.7"), "problem")
    assert "Python 3.12 or newer" in text
    assert not any(k.runs for k in kernels(Machine(packages=old("0.10.2")).facts()))
    assert any("older than 0.10.2" in f.what for f in troubles(Machine(packages=old("0.9.0"))))
    assert "newer than any that jmoe was tested with" in only(Machine(packages=old("0.13.0")), "warning")


def test_gpus_that_are_hidden_or_do_not_start():
    assert "JAX_PLATFORMS=cpu keeps JAX off" in only(Machine(env={"JAX_PLATFORMS": "cpu"}, **ON_CPU), "warning")
    assert "hides all GPUs" in only(Machine(env={"CUDA_VISIBLE_DEVICES": ""}, **ON_CPU), "warning")
    off = ON_CPU | {"cuda_error": RuntimeError("CUDA_ERROR_NO_DEVICE\nand a long traceback")}
    text = only(Machine(**off), "problem")
    assert "does not start on the GPUs: RuntimeError: CUDA_ERROR_NO_DEVICE |" in text


def test_a_plugin_that_does_not_load_is_named_and_its_traceback_is_not_printed(capsys):
    def complain():
        try:
            raise RuntimeError("Unable to load cuDNN. Is it installed?")
        except RuntimeError:
            logging.getLogger("jax._src.xla_bridge").exception("Jax plugin configuration error")

    text = only(Machine(log=complain, **ON_CPU), "problem")
    assert "CUDA plugin does not load: RuntimeError: Unable to load cuDNN" in text and "'jmoe[cuda13]'" in text
    assert "Traceback" not in capsys.readouterr().err
    assert not any("cuDNN" in f.what for f in diagnose(Machine(smi="", log=complain, **ON_CPU).facts()))


@pytest.mark.parametrize("smi", ["", IDLE.format(0)])
def test_a_jax_that_does_not_start_at_all(smi, capsys, monkeypatch):
    error = RuntimeError("jaxlib version 0.11.2 is newer than and incompatible with jax version 0.11.0.")
    m = Machine(smi=smi, start_error=error, access=None)
    found = [f for f in troubles(m) if f.level == "problem"]
    assert len(found) == 1 and "JAX does not start: RuntimeError: jaxlib version 0.11.2 is newer" in found[0].what
    status, page = printed(m, capsys, monkeypatch)
    assert status == 1 and "off all kernels JAX does not start" in page


def test_mig_and_a_missing_nccl():
    assert "MIG is on" in only(Machine(smi=Machine().smi.replace("Disabled", "Enabled")), "warning")
    assert "no nvidia-nccl package" in only(Machine(packages=packages(nvidia_nccl_cu13=None)), "warning")


def test_problems_come_first():
    m = Machine(access=dict.fromkeys([(0, 1)], (False, False)), packages=packages(nvidia_nccl_cu13=None))
    assert [f.level for f in diagnose(m.facts())][:2] == ["problem", "warning"]


def test_nvidia_smi_is_read():
    driver, gpus = machine.parse_nvidia_smi(BUSY.replace("97, Disabled", "97, Enabled"))
    assert driver == "580.65.06" and [g.index for g in gpus] == [0, 1]
    assert gpus[1].memory_used == 100000 * 2**20 and gpus[1].utilization == 97 and gpus[1].mig and not gpus[0].mig
    assert machine.parse_nvidia_smi("535.1, 0, Tesla T4, 15360, [N/A], [N/A], [N/A]")[1][0].memory_used == 0
    assert machine.parse_nvidia_smi("NVIDIA-SMI has failed because it could not talk to the driver") == ("", ())


def test_versions_are_compared_as_numbers():
    assert machine.version("0.11.2.dev20260101") == (0, 11, 2) and machine.version("") == ()
    assert machine.version("0.9.1") < machine.version("0.10.2")


# --- kernels


@needs_new_jax
def test_kernels_run_where_their_own_reasons_let_them():
    def running(*devices, **fields):
        return {k.name for k in kernels(Machine(devices=devices, **fields).facts()) if k.runs}

    hopper = running(gpu(0), gpu(1))
    assert {"quantise and dequantise", "grouped matmul, mosaic_sm90", "exchange by remote writes"} <= hopper
    assert "exchange by remote writes" not in running(gpu(0))
    blackwell = running(gpu(0, "10.0", "NVIDIA B200"), gpu(1, "10.0", "NVIDIA B200"))
    assert "grouped matmul, mosaic_sm90" not in blackwell and "quantise and dequantise" in blackwell
    assert not running(gpu(0, "7.5", "Tesla T4"))
    assert not running(gpu(0), gpu(1), mosaic_error=ImportError("no mosaic"))
    (one,) = kernels(Machine(mosaic_error=ImportError("no mosaic")).facts())
    assert "no mosaic" in one.why
    cut = Machine(access=dict.fromkeys([(0, 1), (1, 0)], (False, False)))
    (reason,) = (k.why for k in kernels(cut.facts()) if k.name == "exchange by remote writes")
    assert "peer access" in reason
    for k in kernels(Machine(devices=(gpu(0, "8.0"),)).facts()):
        assert k.runs or k.why


@needs_new_jax
def test_the_doctor_and_the_support_matrix_agree():
    for name, caps in support.ARCHITECTURES.items():
        reasons = support.kernel_reasons(caps)
        hopper_matmul = reasons.get("grouped matmul, mosaic_sm90", "no GPU") is None
        assert hopper_matmul == (support.matmul(None, None, name).how == "mosaic_sm90") == (name == "Hopper")


# --- this machine


def test_gathering_facts_works_on_this_machine():
    facts = gather()
    assert facts.packages["jax"] and facts.jax >= doctor.OLDEST_JAX and facts.jax_devices
    assert all(f.level in ("ok", "warning", "problem") for f in diagnose(facts))


def test_the_command_itself_beside_a_driver_that_lists_gpus(tmp_path):
    """Real processes: nvidia-smi is a script that answers for an H200, and JAX here has no GPU to start on."""
    smi = tmp_path / "nvidia-smi"
    smi.write_text(f"#!/bin/sh\necho '{IDLE.format(0)}'\n")
    smi.chmod(smi.stat().st_mode | stat.S_IXUSR)
    env = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS", "CUDA_VISIBLE_DEVICES")}

    def run(path, **more):
        command = [sys.executable, "-m", "jmoe", "doctor", "--no-self-test"]
        done = subprocess.run(command, env=env | {"PATH": path} | more, capture_output=True, text=True, timeout=120)
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, " ".join(done.stdout.split())

    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    if any(machine.package_version(p) for p in machine.PLUGIN_PACKAGES):
        status, page = run(path)
        assert status == 1 and ("CUDA plugin does not load" in page or "does not start on the GPUs" in page)
    else:
        status, page = run(path)
        assert status == 1 and "JAX has no CUDA plugin: it runs on cpu beside 1 idle GPU" in page
        site = tmp_path / "site"
        for name in ("jax_cuda13_plugin", "jax_cuda13_pjrt"):
            info = site / f"{name}-0.1.0.dist-info"
            info.mkdir(parents=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 0.1.0\n")
        status, page = run(path, PYTHONPATH=os.pathsep.join([str(site), env.get("PYTHONPATH", "")]))
        assert status == 1 and "mismatched plugin: jax-cuda13-plugin is 0.1.0" in page


def test_a_broken_jaxlib_is_found_and_not_a_traceback(tmp_path):
    """Python finds a `jax` that cannot be imported, as with a jaxlib of another version."""
    (tmp_path / "jax").mkdir()
    (tmp_path / "jax" / "__init__.py").write_text("raise RuntimeError('jaxlib version 9 is incompatible with jax 8')")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-m", "jmoe", "doctor"], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and not done.stderr
    assert "JAX does not start: RuntimeError: jaxlib version 9 is incompatible" in " ".join(done.stdout.split())


# --- the self-test


def test_the_self_test_passes_on_this_machine():
    cases = [c for c in selftest.CASES if c.name in ("layer, mxfp8", "grouped matmul", "quantise to nvfp4_token")]
    results = selftest.run_self_test(cases=cases, budget=300)
    assert [r.status for r in results] == ["ok"] * 3, results
    assert "8 ranks, mxfp8 sent by" in results[1].detail


def test_the_self_test_finds_what_is_wrong():
    def failing():
        raise RuntimeError("no kernel image\nfor this device")

    runs = {"too noisy": lambda: (3.0, "as it ran"), "not quantised": lambda: (120.0, ""), "raises": failing}
    cases = [selftest.Case(name, run, 26.0, 40.0) for name, run in runs.items()]
    seen = []
    noisy, plain, raised = selftest.run_self_test(seen.append, cases=cases)
    assert {r.status for r in (noisy, plain, raised)} == {"failed"} and seen == list(runs)
    assert "SQNR is 3.0 dB and must be 26 to 40; as it ran" in noisy.detail
    assert "SQNR is 120.0 dB" in plain.detail
    assert raised.detail.startswith("RuntimeError: no kernel image (failing, line ") and raised.sqnr is None


def test_the_self_test_stops_in_time_and_says_what_it_left_out():
    cases = [selftest.Case(str(i), lambda: (50.0, ""), 40.0) for i in range(2)]
    results = selftest.run_self_test(cases=cases, budget=0.0)
    assert [r.status for r in results] == ["skipped"] * 2 and "0 s for tests are over" in results[0].detail


def test_a_wrong_byte_fails_the_quantisation_test(monkeypatch):
    true = selftest.quantize

    def flipped(x, fmt, **options):
        q = true(x, fmt, **options)
        return q if options else dataclasses.replace(q, block_scale=q.block_scale.at[0, 0].add(1))

    monkeypatch.setattr(selftest, "quantize", flipped)
    case = next(c for c in selftest.CASES if c.name == "quantise to mxfp8")
    (result,) = selftest.run_self_test(cases=[case])
    assert result.status == "failed" and "1 bytes differ" in result.detail


def test_failed_self_tests_decide_the_exit_status():
    failed = selftest.Result("layer", "failed", 3.0, "at least 40", 0.1, "")
    skipped = dataclasses.replace(failed, status="skipped")
    assert doctor.Report([], [], [failed]).status == 1 and doctor.Report([], [], [skipped]).status == 0
    assert "1 self-test failed" in doctor.Report([], [], [failed]).verdict()
    assert doctor.Report([], [], [skipped]).verdict() == "Nothing is wrong."
