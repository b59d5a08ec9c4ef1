"""Each broken setup is found and named, from facts alone; and the self-test sees a layer that is wrong."""

import dataclasses

import pytest

from jmoe import doctor, selftest
from jmoe.doctor import Facts, Gpu, diagnose, kernels

H200 = ("NVIDIA H200", (9, 0))
PACKAGES = {
    "jmoe": "0.1.0",
    "jax": "0.11.2",
    "jaxlib": "0.11.2",
    "jax-cuda13-plugin": "0.11.2",
    "jax-cuda13-pjrt": "0.11.2",
    "nvidia-nccl-cu13": "2.28.3",
}
GIB = 2**30
GPUS = tuple(Gpu(i, "NVIDIA H200", 141 * GIB, 0, 0) for i in range(2))
HEALTHY = Facts(
    python="3.12.4",
    packages=PACKAGES,
    driver="580.65.06",
    gpus=GPUS,
    jax_platform="gpu",
    jax_devices=(H200, H200),
    peers={(0, 1): (True, True), (1, 0): (True, True)},
)


def changed(**fields):
    return dataclasses.replace(HEALTHY, **fields)


def packages(**versions):
    merged = PACKAGES | {k.replace("_", "-"): v for k, v in versions.items()}
    return {k: v for k, v in merged.items() if v is not None}


def troubles(facts):
    return [f for f in diagnose(facts) if f.level != "ok"]


def only(facts, level):
    (finding,) = troubles(facts)
    assert finding.level == level and finding.todo
    return f"{finding.what} | {finding.todo}"


def test_a_healthy_machine_has_nothing_to_report():
    assert not troubles(HEALTHY)
    text = " ".join(f.what for f in diagnose(HEALTHY))
    for part in ("2 GPUs (NVIDIA H200), driver 580.65.06", "JAX 0.11.2", "NVLink between all 2 GPUs", "NCCL 2.28.3"):
        assert part in text


def test_no_gpu():
    facts = changed(gpus=(), driver="", jax_platform="cpu", jax_devices=(("cpu", None),), peers=None)
    text = only(facts, "warning")
    assert "no GPU: nvidia-smi lists none" in text and "portable implementations" in text and "--gpus all" in text


@pytest.mark.parametrize("driver, extra", [("580.65.06", "cuda13"), ("550.54.15", "cuda12")])
def test_jax_without_a_cuda_plugin(driver, extra):
    bare = packages(jax_cuda13_plugin=None, jax_cuda13_pjrt=None)
    facts = changed(packages=bare, driver=driver, jax_platform="cpu", jax_devices=(("cpu", None),), peers=None)
    text = only(facts, "problem")
    assert "no CUDA plugin: it runs on cpu beside 2 idle GPUs" in text and f"pip install 'jmoe[{extra}]'" in text


def test_a_mismatched_plugin():
    facts = changed(packages=packages(jax_cuda13_plugin="0.11.0", jax_cuda13_pjrt="0.11.0"))
    found = troubles(facts)
    assert [f.level for f in found] == ["problem"] * 2
    assert "mismatched plugin: jax-cuda13-plugin is 0.11.0 and jaxlib is 0.11.2" in found[0].what
    assert found[0].todo == "pip install 'jax[cuda13]==0.11.2'"


def test_half_a_plugin_and_two_plugins():
    assert "jax-cuda13-pjrt is missing" in only(changed(packages=packages(jax_cuda13_pjrt=None)), "problem")
    both = changed(packages=packages(jax_cuda12_plugin="0.11.2", jax_cuda12_pjrt="0.11.2"))
    assert "CUDA 12 and 13 are both installed" in only(both, "problem")


def test_a_driver_that_is_too_old_for_the_plugin():
    text = only(changed(driver="550.54.15"), "problem")
    assert "driver 550.54.15 is too old for CUDA 13, which needs 580" in text and "'jmoe[cuda12]'" in text


def test_no_peer_access():
    facts = changed(peers={(0, 1): (False, False), (1, 0): (True, True)})
    text = only(facts, "problem")
    assert "no peer access between GPUs 0 -> 1" in text and "nvidia-smi topo -p2p r" in text and "ACS" in text
    assert "no peer access" in {k.name: k.why for k in kernels(facts)}["one-sided exchange"]


def test_peers_over_pcie_and_peers_that_are_unknown():
    assert "PCIe, not NVLink" in only(changed(peers={(0, 1): (True, False), (1, 0): (True, False)}), "warning")
    assert "peer access is unknown" in only(changed(peers=None), "warning")


def test_one_gpu_of_two_is_busy():
    busy = dataclasses.replace(GPUS[0], memory_used=100 * GIB, utilization=97)
    text = only(changed(gpus=(busy, GPUS[1])), "warning")
    assert "1 of 2 GPUs are in use by other processes: GPU 0 has 100.0 of 141 GiB in use, 97 % busy" in text
    assert "CUDA_VISIBLE_DEVICES=1 uses the free ones" in text
    both = only(changed(gpus=(busy, dataclasses.replace(busy, index=1))), "warning")
    assert "2 of 2 GPUs" in both and "end the processes" in both
    idle = dataclasses.replace(GPUS[0], memory_used=GIB // 2, utilization=3)  # what a driver keeps for itself
    assert not troubles(changed(gpus=(idle, GPUS[1])))


def test_jax_too_old_for_the_kernels():
    old = packages(jax="0.10.2", jaxlib="0.10.2", jax_cuda13_plugin="0.10.2", jax_cuda13_pjrt="0.10.2")
    text = only(changed(packages=old), "problem")
    assert "JAX 0.10.2 is too old for the GPU kernels, which need 0.11" in text and "Python" not in text
    assert "Python 3.12 or newer" in only(changed(packages=old, python="3.11.7"), "problem")
    assert not any(k.runs for k in kernels(changed(packages=old)))
    ancient = packages(jax="0.9.0", jaxlib="0.9.0", jax_cuda13_plugin="0.9.0", jax_cuda13_pjrt="0.9.0")
    assert any("older than 0.10.2" in f.what for f in troubles(changed(packages=ancient)))


def test_jax_newer_than_tested():
    new = packages(jax="0.13.0", jaxlib="0.13.0", jax_cuda13_plugin="0.13.0", jax_cuda13_pjrt="0.13.0")
    assert "newer than any that jmoe was tested with" in only(changed(packages=new), "warning")


def test_gpus_that_are_hidden_or_do_not_start():
    off = dict(jax_platform="cpu", jax_devices=(("cpu", None),), peers=None)
    assert "JAX_PLATFORMS=cpu keeps JAX off" in only(changed(env={"JAX_PLATFORMS": "cpu"}, **off), "warning")
    assert "hides all GPUs" in only(changed(env={"CUDA_VISIBLE_DEVICES": ""}, **off), "warning")
    text = only(changed(jax_error="CUDA_ERROR_NO_DEVICE", **off), "problem")
    assert "does not start on the GPUs: CUDA_ERROR_NO_DEVICE" in text
    assert only(changed(**(off | {"jax_platform": ""})), "problem")


def test_mig_and_a_missing_nccl():
    sliced = tuple(dataclasses.replace(g, mig=True) for g in GPUS)
    assert "MIG is on" in only(changed(gpus=sliced), "warning")
    assert "no nvidia-nccl package" in only(changed(packages=packages(nvidia_nccl_cu13=None)), "warning")


def test_problems_come_first():
    facts = changed(peers={(0, 1): (False, False)}, packages=packages(nvidia_nccl_cu13=None))
    assert [f.level for f in diagnose(facts)][:2] == ["problem", "warning"]


def test_kernels_run_where_they_were_made_for():
    def running(device, count=2, **fields):
        return {k.name for k in kernels(changed(jax_devices=(device,) * count, **fields)) if k.runs}

    assert running(H200) == {"quantise and dequantise", "grouped matmul, Hopper", "one-sided exchange"}
    assert "one-sided exchange" not in running(H200, 1)
    assert "grouped matmul, block-scaled" in running(("NVIDIA B200", (10, 0)))
    ada = ("NVIDIA L40S", (8, 9))
    assert running(ada) == set() and running(ada, packages=packages(jax_triton="0.3.1")) == {"grouped matmul, Triton"}
    assert not running(H200, mosaic_error="ImportError: no mosaic")
    reasons = {k.why for k in kernels(changed(mosaic_error="ImportError: no mosaic"))}
    assert any("no mosaic" in why for why in reasons)
    assert all("plain XLA" in k.why for k in kernels(changed(jax_platform="cpu", jax_devices=(("cpu", None),))))


def test_nvidia_smi_is_read():
    text = "580.65.06, 0, NVIDIA H200, 143771, 4, 0, Disabled\n580.65.06, 1, NVIDIA H200, 143771, 100000, 98, Enabled\n"
    driver, gpus = doctor.parse_nvidia_smi(text)
    assert driver == "580.65.06" and [g.index for g in gpus] == [0, 1]
    assert gpus[1].memory_used == 100000 * 2**20 and gpus[1].utilization == 98 and gpus[1].mig and not gpus[0].mig
    assert doctor.parse_nvidia_smi("535.1, 0, Tesla T4, 15360, [N/A], [N/A], [N/A]")[1][0].memory_used == 0
    assert doctor.parse_nvidia_smi("NVIDIA-SMI has failed because it could not talk to the driver") == ("", ())


def test_versions_are_compared_as_numbers():
    assert doctor.version("0.11.2.dev20260101") == (0, 11, 2) and doctor.version("") == ()
    assert doctor.version("0.9.1") < doctor.version("0.10.2")


def test_gathering_facts_works_on_this_machine():
    facts = doctor.gather()
    assert facts.packages["jax"] and facts.jax >= doctor.OLDEST_JAX and facts.jax_devices
    assert all(f.level in ("ok", "warning", "problem") for f in diagnose(facts))


def test_the_self_test_passes_on_this_machine():
    (result,) = selftest.self_test(selftest.CASES[1:2], max_devices=2)
    assert result.ok, result
    assert 26 <= result.sqnr <= 40 and "mxfp8 sent" in result.detail


def test_the_self_test_finds_a_layer_that_is_wrong(monkeypatch):
    case = ("mxfp8", "mxfp8", 26.0, 40.0)

    def failing(*_):
        raise RuntimeError("no kernel image\nfor this device")

    outcomes = {
        "too noisy": lambda *_: (3.0, "one rank"),
        "not quantised": lambda *_: (120.0, "one rank"),
        "raises": failing,
    }
    results = {}
    for name, run in outcomes.items():
        monkeypatch.setattr(selftest, "_run", run)
        (results[name],) = selftest.self_test((case,))
    assert not any(r.ok for r in results.values())
    assert "SQNR is 3.0 dB and must be at least 26" in results["too noisy"].detail
    assert "SQNR is 120.0 dB and must be at most 40" in results["not quantised"].detail
    assert results["raises"].detail.startswith("RuntimeError: no kernel image (failing, line ")
