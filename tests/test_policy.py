"""What travels and who quantises it: the whole matrix, every refusal, and what decisions may depend on."""

import dataclasses
import itertools

import jax
import pytest

from jmoe import backends
from jmoe.caps import LINKS, DeviceCaps, count_hosts, detect_link, parse_capability
from jmoe.config import MoEConfig, QuantConfig
from jmoe.experts import EXPERTS
from jmoe.policy import BACKENDS, BackendOptions, candidates, decide, draft_scheme, family, resolve_contract, table
from pallas_kernels.quantize.formats import FORMATS

HOPPER = DeviceCaps("gpu", (9, 0), 8, "nvlink", name="NVIDIA H200")
BLACKWELL = dataclasses.replace(HOPPER, compute_capability=(10, 0), name="NVIDIA B200")
CPU = DeviceCaps("cpu", None, 8, "host")
TWO_HOSTS = dataclasses.replace(HOPPER, link="network", num_hosts=2)
NO_OPT_INS = BackendOptions()
NVFP4_OPT_IN = BackendOptions(deepep_ll_nvfp4=True)

# Written down here a second time on purpose: (what travels, who quantises, what the receiver does) for each family.
PLAIN = ("bfloat16", "nobody", "pass")
SENDER = ("quant", "sender", "pass")
KERNEL = ("quant", "kernel", "pass")
RECEIVER = ("bfloat16", "receiver", "quantize")
TO_EXPERTS = ("bfloat16", "experts", "pass")
REFUSED = None
COLUMNS = (None, "fp8_128", "mxfp8", "mxfp4", "nvfp4", "nvfp4_token")
MATRIX = {
    "local": (PLAIN, SENDER, SENDER, SENDER, SENDER, SENDER),
    "allgather_reducescatter": (PLAIN, SENDER, SENDER, SENDER, SENDER, SENDER),
    "nvlink_two_sided": (PLAIN, SENDER, SENDER, RECEIVER, SENDER, SENDER),
    "nvlink_one_sided": (PLAIN, SENDER, SENDER, REFUSED, SENDER, SENDER),
    "deepep_high_throughput": (PLAIN, SENDER, RECEIVER, RECEIVER, RECEIVER, RECEIVER),
    "low_latency": (PLAIN, KERNEL, RECEIVER, RECEIVER, TO_EXPERTS, REFUSED),
    "nixl_ep": (PLAIN, KERNEL, RECEIVER, RECEIVER, TO_EXPERTS, REFUSED),
}
DEFERRING = EXPERTS["grouped_deferred"]


def layer(activations=None, *, hidden=256, top_k=2, experts=8, **quant):
    return MoEConfig(hidden, 128, experts, top_k, quant=QuantConfig(activations=activations, **quant))


def decided(
    activations=None, backend="auto", *, caps=HOPPER, ranks=8, tokens=64, experts=None, options=NO_OPT_INS, **q
):
    ranks = 1 if backend == "local" else ranks
    config = layer(activations, **q)
    return decide(config, backend=backend, num_ranks=ranks, tokens=tokens, caps=caps, experts=experts, options=options)


def formats_of(kind):
    return [name for name in FORMATS if family(name) == kind]


# --- the matrix


@pytest.mark.parametrize("backend", MATRIX)
def test_each_backend_sends_what_the_matrix_says(backend):
    for kind, expected in zip(COLUMNS, MATRIX[backend], strict=True):
        for name in [None] if kind is None else formats_of(kind):
            if expected is REFUSED:
                with pytest.raises(ValueError, match=f"{backend}.*{name}"):
                    decided(name, backend)
                continue
            for caps in (HOPPER, CPU, BLACKWELL):  # the device changes what is native and what moves bytes, not this
                d = decided(name, backend, caps=caps)
                wire = name if expected[0] == "quant" else expected[0]
                assert (d.wire, d.where, d.on_receive) == (wire, *expected[1:])
                assert d.backend == backend and d.form == BACKENDS[backend].form and d.quant_dtype == name


def test_the_policy_and_the_backends_know_the_same_backends():
    assert set(BACKENDS) == set(backends.BACKENDS) == set(MATRIX)
    for name, row in BACKENDS.items():
        assert row.form == backends.get_backend(name).form
    for alias, name in backends.ALIASES.items():
        assert decided("mxfp8", alias).backend == name if name != "local" else True


def test_f08_the_activations_are_quantised_once_over_all_legal_pairs():
    for backend, name, experts in itertools.product(BACKENDS, table.ACTIVATION_FORMATS, (None, *EXPERTS.values())):
        try:
            d = decided(name, backend, experts=experts)
        except ValueError:
            continue
        before = d.quantised_wire
        after = d.on_receive in ("quantize", "requantize")
        inside = d.where == "experts"
        assert before + after + inside == 1
        assert (d.delivered is None) == inside


def test_what_experts_get_and_which_scale_travels():
    token = decided("nvfp4_token", "nvlink_two_sided")
    assert (token.wire, token.delivered, token.scale) == ("nvfp4_token", "nvfp4_token", "token")
    tensor = decided("nvfp4", "nvlink_two_sided")
    assert tensor.scale == "static" and any("same number on every rank" in n for n in tensor.notes)
    assert decided("mxfp8", "nvlink_two_sided").scale == "none"
    assert decided("nvfp4", "nixl_ep").delivered is None and decided("nvfp4", "nixl_ep").quant_dtype == "nvfp4"


def test_f02_the_wire_follows_what_is_sent_where_experts_quantise_for_themselves():
    for backend in (
        "local",
        "allgather_reducescatter",
        "nvlink_two_sided",
        "nvlink_one_sided",
        "deepep_high_throughput",
    ):
        d = decided("nvfp4", backend, experts=DEFERRING)
        assert (d.wire, d.where, d.on_receive, d.delivered, d.defer) == ("bfloat16", "experts", "pass", None, True)
        assert "quantise to nvfp4 themselves" in d.reason
    assert not decided(None, "low_latency").defer


def test_f04_an_absent_quant_config_is_an_unquantised_layer():
    config = dataclasses.replace(layer(), quant=None)
    assert decide(config, backend="nvlink_one_sided", num_ranks=8, caps=HOPPER, options=NO_OPT_INS).wire == "bfloat16"


def test_f05_nixl_decides_from_the_layers_own_quant_dtype():
    for options in (NO_OPT_INS, NVFP4_OPT_IN):
        d = decided("nvfp4", "nixl_ep", options=options)
        assert (d.wire, d.where, d.on_receive) == ("bfloat16", "experts", "pass")
    assert decided("fp8", "nixl_ep").where == "kernel"


def test_f06_another_scheme_than_the_transports_is_dequantised_first():
    d = decided("mxfp8", "low_latency", wire="fp8_128")
    assert (d.wire, d.where, d.on_receive, d.delivered) == ("fp8_128", "kernel", "requantize", "mxfp8")
    assert any("quantised twice" in note for note in d.notes)


# --- opt-ins and the environment


def test_f07_the_opt_in_changes_its_own_backend_and_no_other():
    for backend, name in itertools.product(BACKENDS, (None, *table.ACTIVATION_FORMATS)):
        outcomes = []
        for options in (NO_OPT_INS, NVFP4_OPT_IN):
            try:
                outcomes.append(decided(name, backend, options=options))
            except ValueError as refusal:
                outcomes.append(str(refusal))
        changes = backend == "low_latency" and name is not None and family(name) == "nvfp4"
        if changes:
            assert [d.wire for d in outcomes] == ["bfloat16", name] and outcomes[1].where == "kernel"
            assert "JMOE_DEEPEP_LL_NVFP4" in outcomes[1].reason
        elif backend != "low_latency":
            assert outcomes[0] == outcomes[1]


def test_f07_the_environment_is_read_once(monkeypatch):
    from jmoe.policy.decide import process_options

    monkeypatch.setenv("JMOE_DEEPEP_LL_NVFP4", "1")
    assert BackendOptions.from_env() == NVFP4_OPT_IN
    process_options.cache_clear()
    try:
        before = decided("nvfp4", "low_latency", options=None)
        monkeypatch.setenv("JMOE_DEEPEP_LL_NVFP4", "0")
        assert decided("nvfp4", "low_latency", options=None) == before and before.wire == "nvfp4"
        assert decided("nvfp4", "low_latency", options=BackendOptions.from_env()).wire == "bfloat16"
    finally:
        process_options.cache_clear()


def test_f07_a_value_that_makes_no_sense_is_refused():
    assert BackendOptions.from_env({}) == BackendOptions.from_env({"JMOE_DEEPEP_LL_NVFP4": ""}) == NO_OPT_INS
    with pytest.raises(ValueError, match="JMOE_DEEPEP_LL_NVFP4='yes' is not understood; set it to 1 or 0"):
        BackendOptions.from_env({"JMOE_DEEPEP_LL_NVFP4": "yes"})


# --- refusals: what was asked, what is possible, what to do


def test_f04_an_unsupported_quant_dtype_is_refused_with_alternatives():
    with pytest.raises(ValueError, match=r"one_sided.*int8.*two_sided") as refusal:
        decided("int8", "nvlink_one_sided")
    text = str(refusal.value)
    assert "was asked for activations in quant dtype 'int8'" in text
    assert "It takes bfloat16 unquantised and mxfp8" in text
    assert "Choose one of those" in text and "allgather_reducescatter" in text
    with pytest.raises(ValueError, match=r"one_sided.*mxfp4.*two_sided"):
        decided("mxfp4", "nvlink_one_sided")
    for backend in BACKENDS:
        with pytest.raises(ValueError, match=f"{backend}.*int8"):
            decided("int8", backend)
        with pytest.raises(ValueError, match=f"{backend}.*fp8_128x128.*a format of weights, not of activations"):
            decided("fp8_128x128", backend)


def test_f04_auto_refuses_what_no_backend_could_do_in_one_sentence():
    with pytest.raises(ValueError, match=r"'int8' were asked for, which is not a format that jmoe has.*mxfp8.*Choose"):
        decided("int8")
    with pytest.raises(ValueError, match=r"blocks of 128 elements, which do not divide hidden_size=192.*mxfp8.*pad"):
        decided("fp8", hidden=192)


@pytest.mark.parametrize("backend", ["low_latency", "nixl_ep"])
def test_f09_backends_that_cannot_defer_refuse_experts_that_want_it(backend):
    batched = dataclasses.replace(DEFERRING, form="batched")
    with pytest.raises(ValueError) as refusal:
        decided("fp8", backend, experts=batched)
    text = str(refusal.value)
    assert "'grouped_deferred'" in text and backend in text and "cannot leave that to them" in text
    assert "nvlink_one_sided" in text and "Use one of those" in text
    assert decided(None, backend, experts=batched).wire == "bfloat16"  # nothing to defer


def test_f09_a_quantised_wire_is_refused_for_experts_that_want_unquantised_rows():
    with pytest.raises(ValueError, match=r"'grouped_deferred'.*wire='mxfp8'.*bfloat16, float16, float32.*'auto'"):
        decided("mxfp8", "nvlink_two_sided", experts=DEFERRING, wire="mxfp8")


def test_f40_per_token_nvfp4_travels_with_its_row_scale_in_the_layers_dtype_or_not_at_all():
    for backend in ("nvlink_one_sided", "nvlink_two_sided", "allgather_reducescatter"):
        carried = decided("nvfp4_online", backend)
        assert (carried.wire, carried.where, carried.scale) == ("nvfp4_token", "sender", "token")
        assert "row scale" in carried.reason
        plain = decided("nvfp4_online", backend, wire="bfloat16")
        assert (plain.wire, plain.where, plain.delivered) == ("bfloat16", "receiver", "nvfp4_token")
        with pytest.raises(ValueError, match=rf"{backend}.*wire='nvfp4'.*no place for a token's scale.*'nvfp4_token'"):
            decided("nvfp4_online", backend, wire="nvfp4")
    for backend in ("low_latency", "deepep_low_latency", "nixl_ep"):
        with pytest.raises(ValueError, match=r"nvfp4_token.*no slot for a token's scale.*two_sided"):
            decided("nvfp4_online", backend)


def test_f47_forms_must_pair():
    with pytest.raises(ValueError, match=r"nvlink_two_sided.*standard form.*'batched'.*batched form.*low_latency"):
        decided("mxfp8", "nvlink_two_sided", experts=EXPERTS["batched"])
    with pytest.raises(ValueError, match=r"low_latency.*batched form.*'grouped'.*standard form.*nvlink_one_sided"):
        decided("mxfp8", "low_latency", experts=EXPERTS["grouped"])


def test_f47_auto_without_any_backend_gives_every_reason():
    with pytest.raises(NotImplementedError) as refusal:
        decided("nvfp4_token", experts=EXPERTS["batched"])
    text = str(refusal.value)
    assert "found no backend for quant dtype 'nvfp4_token' on 8 ranks" in text
    for name, _ in candidates(layer(), num_ranks=8, tokens=64, caps=HOPPER):
        assert f"{name}: " in text


def test_an_unknown_backend_is_refused_with_all_names():
    with pytest.raises(ValueError, match=r"'nvshmem' is not known.*nvlink_one_sided.*flashinfer_nvlink_one_sided"):
        decided(None, "nvshmem")


def test_local_serves_one_rank():
    with pytest.raises(ValueError, match=r"'local' was asked to serve 4 ranks; it serves one.*backend='auto'"):
        decide(layer(), backend="local", num_ranks=4, caps=CPU, options=NO_OPT_INS)
    with pytest.raises(ValueError, match="num_ranks=0 must be at least 1"):
        decide(layer(), num_ranks=0, caps=CPU, options=NO_OPT_INS)


def test_f44_blocks_must_divide_the_hidden_size():
    with pytest.raises(ValueError, match=r"activations='fp8_128'.*128.*hidden_size=192.*mxfp8.*pad the hidden size"):
        decided("fp8", "nvlink_one_sided", hidden=192)
    with pytest.raises(ValueError, match=r"activations='mxfp8'.*hidden_size=48.*nvfp4.*mx_alignment=32"):
        decided("mxfp8", "nvlink_one_sided", hidden=48)
    assert decided("mxfp8", "nvlink_one_sided", hidden=48, mx_alignment=64).wire == "mxfp8"
    with pytest.raises(ValueError, match=r"wire='fp8_128' quantises blocks of 128"):
        decided(None, "nvlink_one_sided", hidden=192, wire="fp8_128")


# --- the wire on request


def test_the_wire_can_be_asked_for():
    plain = decided("mxfp8", "nvlink_one_sided", wire="bfloat16")
    assert (plain.wire, plain.where, plain.on_receive, plain.delivered) == ("bfloat16", "receiver", "quantize", "mxfp8")
    assert plain.reason == "QuantConfig.wire='bfloat16' was asked for."
    squeezed = decided(None, "nvlink_one_sided", wire="mxfp8")
    assert (squeezed.wire, squeezed.where, squeezed.on_receive) == ("mxfp8", "sender", "dequantize")
    assert squeezed.delivered is None and squeezed.quant_dtype is None
    alias = decided(None, "nvlink_two_sided", wire="nvfp4_online")
    assert alias.wire == "nvfp4_token" and alias.scale == "token"
    assert decided("mxfp8", "nvlink_two_sided", wire="mxfp8_floor").on_receive == "pass"  # decodes alike
    assert decided("mxfp8", "deepep_high_throughput", wire="mxfp8").where == "sender"


def test_a_float_wire_narrower_than_the_layers_dtype_is_cast():
    config = dataclasses.replace(layer(wire="bfloat16"), dtype="float32")
    d = decide(config, backend="nvlink_two_sided", num_ranks=8, caps=CPU, options=NO_OPT_INS)
    assert (d.wire, d.where, d.on_receive, d.combine_wire) == ("bfloat16", "nobody", "cast", "float32")
    auto = dataclasses.replace(config, quant=QuantConfig())
    assert decide(auto, backend="nvlink_two_sided", num_ranks=8, caps=CPU, options=NO_OPT_INS).wire == "float32"


def test_a_wire_that_a_backend_cannot_carry_is_refused_with_those_that_it_can():
    with pytest.raises(
        ValueError, match=r"low_latency.*wire='mxfp8'.*It can send bfloat16.*fp8_128.*or use '"
    ) as refusal:
        decided(None, "low_latency", wire="mxfp8")
    assert "'nvlink_one_sided'" in str(refusal.value)
    with pytest.raises(ValueError, match=r"wire='int8'.*It can send.*Set QuantConfig.wire to one of those or 'auto'\."):
        decided(None, "nvlink_two_sided", wire="int8")


def test_expert_outputs_come_back_in_the_layers_dtype_unless_asked():
    assert decided("mxfp8", "nvlink_one_sided").combine_wire == "bfloat16"
    assert decided("mxfp8", "nvlink_one_sided", combine_wire="mxfp8").combine_wire == "mxfp8"


# --- the choice of a backend


@pytest.mark.parametrize(
    "ranks, top_k, caps, expected",
    [
        (1, 2, HOPPER, "local"),
        (2, 2, CPU, "allgather_reducescatter"),
        (4, 8, CPU, "allgather_reducescatter"),
        (4, 2, CPU, "nvlink_two_sided"),
        (8, 8, CPU, "nvlink_two_sided"),
        (2, 2, HOPPER, "nvlink_one_sided"),
        (8, 8, BLACKWELL, "nvlink_one_sided"),
        (8, 8, dataclasses.replace(HOPPER, link="host"), "nvlink_two_sided"),
        (8, 8, dataclasses.replace(HOPPER, link="network"), "deepep_high_throughput"),
        (8, 8, dataclasses.replace(HOPPER, link="network", ragged=False), "nvlink_two_sided"),
        (8, 8, TWO_HOSTS, "nvlink_one_sided"),
        (8, 8, dataclasses.replace(TWO_HOSTS, num_hosts=8), "deepep_high_throughput"),  # one GPU on each host
        (8, 8, dataclasses.replace(HOPPER, compute_capability=(8, 0)), "nvlink_two_sided"),
        (8, 8, dataclasses.replace(HOPPER, kernels=False), "nvlink_two_sided"),
    ],
)
def test_auto_chooses_by_ranks_and_machine(ranks, top_k, caps, expected):
    for tokens in (0, 1, 8192):
        d = decided(None, ranks=ranks, top_k=top_k, caps=caps, tokens=tokens)
        assert d.backend == expected and d.reason.startswith(f"backend='auto' chose {expected}: ")


def test_auto_passes_over_backends_that_refuse():
    assert decided("mxfp4").backend == "nvlink_two_sided"
    assert decided("mxfp8", experts=EXPERTS["batched"]).backend == "low_latency"
    assert decided("mxfp8", experts=EXPERTS["batched"], ranks=1).backend == "low_latency"


def test_auto_takes_low_latency_only_below_its_measured_threshold(monkeypatch):
    monkeypatch.setattr(table, "LOW_LATENCY_BELOW_TOKENS", 65)
    assert decided("fp8", tokens=64).backend == "low_latency"
    assert decided("fp8", tokens=65).backend == "nvlink_one_sided"
    assert decided("fp8", tokens=64, experts=EXPERTS["grouped"]).backend == "nvlink_one_sided"


def test_every_decision_says_what_moves_the_bytes_and_why_not_the_kernel():
    assert decided("mxfp8", "nvlink_one_sided").transport == "kernel"
    for caps, why in (
        (CPU, "no GPUs"),
        (dataclasses.replace(HOPPER, compute_capability=(8, 9)), "Ada is older than Hopper"),
        (dataclasses.replace(HOPPER, kernels=False, kernels_reason="needs JAX >= 0.11."), "needs JAX >= 0.11"),
        (dataclasses.replace(HOPPER, link="network"), "within one process"),
        (dataclasses.replace(HOPPER, link="host"), "no access to each other's memory"),
    ):
        for backend in ("nvlink_one_sided", "low_latency", "nixl_ep"):
            d = decided("fp8", backend, caps=caps)
            assert (
                d.transport == "xla" and why in d.transport_reason and "same layout and results" in d.transport_reason
            )
    assert (
        "lax.ragged_all_to_all"
        in decided("fp8", "ragged", caps=dataclasses.replace(HOPPER, link="network")).transport_reason
    )
    assert decided("fp8", "local").transport == decided("fp8", "nvlink_one_sided", ranks=1).transport == "none"
    assert "NCCL" in decided("fp8", "nvlink_two_sided").transport_reason


def test_on_several_hosts_rows_go_between_hosts_first():
    for backend in ("auto", "nvlink_one_sided", "low_latency"):
        d = decided("fp8", backend, caps=TWO_HOSTS, ranks=8)
        assert d.transport == "hierarchical" and "between 2 hosts, once for each (token, host)" in d.transport_reason
        assert "inside a host lax.all_to_all, because remote writes work within one process" in d.transport_reason
    kernel = decided("fp8", caps=dataclasses.replace(TWO_HOSTS, local_kernels=True), ranks=8)
    assert kernel.transport_reason.endswith("inside a host remote writes")
    assert decided("fp8", "nixl_ep", caps=TWO_HOSTS, ranks=8).transport == "xla"  # ranks come and go
    assert decided("mxfp4", caps=TWO_HOSTS, ranks=8).backend == "deepep_high_throughput"  # one_sided lacks that format
    ragged = decided("fp8", "ragged", caps=dataclasses.replace(TWO_HOSTS, ragged=False), ranks=8)
    assert any("nccl_send_recv_fallback" in note for note in ragged.notes)


def test_hopper_compresses_mx_and_nvfp4_and_blackwell_multiplies_them():
    for name in ("mxfp8", "mxfp4", "nvfp4", "nvfp4_token"):
        hopper, blackwell = (
            decided(name, "allgather_reducescatter"),
            decided(name, "allgather_reducescatter", caps=BLACKWELL),
        )
        assert not hopper.native and "Hopper has no matrix units" in hopper.notes[0]
        assert blackwell.native and "as it is" in blackwell.notes[0]
        assert "On CPU" in decided(name, "allgather_reducescatter", caps=CPU).notes[0]
    assert decided("fp8", "nvlink_one_sided").native
    for capability in ((8, 0), (8, 9)):  # no matrix units with a scale for 128 values, or none of 8 bits at all
        older = dataclasses.replace(HOPPER, compute_capability=capability)
        assert not any(decided(f, "nvlink_two_sided", caps=older).native for f in ("fp8", "mxfp8", "nvfp4_token"))


def test_decisions_are_hashable_and_equal_for_equal_questions():
    assert len({decided("mxfp8"), decided("mxfp8"), decided("nvfp4")}) == 2


# --- names


def test_f15_f38_names_of_other_systems():
    assert decided("nvfp4_online", "nvlink_two_sided").quant_dtype == "nvfp4_token"
    assert decided("modelopt_fp4", "nvlink_two_sided").quant_dtype == "nvfp4"
    assert decided("none").quant_dtype is None and decided("fp8_block").quant_dtype == "fp8_128"


def test_f38_contracts_of_checkpoint_schemes():
    online = resolve_contract("nvfp4_online")
    assert (online.format, online.scale, online.missing_scale, online.convert_weights) == (
        "nvfp4_token",
        "token",
        None,
        True,
    )
    for serialized in (False, True):
        for opt_in in (False, True):
            c = resolve_contract("modelopt_fp4", serialized=serialized, per_token_opt_in=opt_in)
            assert (c.format, c.scale, c.missing_scale, c.convert_weights) == ("nvfp4", "static", 1.0, not serialized)
            if serialized and opt_in:
                c = resolve_contract("modelopt_fp4", serialized=True, per_token=True, per_token_opt_in=True)
                assert (c.format, c.scale) == ("nvfp4_token", "token")
                continue
            with pytest.raises(ValueError, match="'modelopt_fp4' was asked for per-token.*'nvfp4_online'"):
                resolve_contract("modelopt_fp4", serialized=serialized, per_token=True, per_token_opt_in=opt_in)
    with pytest.raises(ValueError, match="NVFP4 already.*Use 'modelopt_fp4'"):
        resolve_contract("nvfp4_online", serialized=True)
    with pytest.raises(ValueError, match="'int8' makes no contract.*nvfp4_online"):
        resolve_contract("int8")
    assert resolve_contract("mxfp8").scale == "none" and resolve_contract("nvfp4").missing_scale == 1.0


def test_f39_draft_heads_inherit():
    table_ = {
        (False, True): ("unquantised",) * 4,
        (False, False): ("nvfp4", "nvfp4", "unquantised", "fp8"),
        (True, False): ("nvfp4", "nvfp4", "unquantised", "fp8"),
        (True, True): ("nvfp4", "nvfp4", "unquantised", "unquantised"),
    }
    for (per_token, source), expected in table_.items():
        got = [
            draft_scheme(per_token=per_token, source_ignored=source, fp4_ignored=fp4, checkpoint_fp8=fp8)
            for fp4, fp8 in ((False, False), (False, True), (True, False), (True, True))
        ]
        assert tuple(got) == expected


# --- capabilities


def test_capabilities_describe_a_machine():
    assert HOPPER.describe() == "8 x NVIDIA H200, Hopper, one NVLink domain"
    assert DeviceCaps().describe() == "1 x CPU, one device"
    names = {
        (8, 0): "Ampere",
        (8, 9): "Ada",
        (9, 0): "Hopper",
        (10, 0): "Blackwell",
        (12, 0): "Blackwell",
        (6, 1): "sm_61",
    }
    for capability, name in names.items():
        assert DeviceCaps("gpu", capability).generation == name
    assert parse_capability("9.0") == (9, 0) and parse_capability(None) is None and parse_capability("gfx942") is None
    with pytest.raises(ValueError, match="link='usb' is not known; choose one of local, nvlink"):
        DeviceCaps(link="usb")
    with pytest.raises(ValueError, match="num_devices=0 must be at least 1"):
        DeviceCaps(num_devices=0)
    with pytest.raises(ValueError, match="num_hosts=3 for 8 devices; hosts must hold equally many"):
        dataclasses.replace(HOPPER, num_hosts=3)
    assert "several processes or hosts (2 hosts)" in TWO_HOSTS.describe()


class Device:
    def __init__(self, platform, process=0, ordinal=0, host=None):
        self.platform, self.process_index, self.local_hardware_id = platform, process, ordinal
        self.slice_index = host


def test_hosts_are_equal_blocks_of_devices():
    by_process = lambda *p, **k: [Device("cpu", i, **k) for i in p]  # noqa: E731
    assert count_hosts(by_process(0, 0, 1, 1)) == 2 and count_hosts(by_process(0, 0, 0, 0)) == 1
    assert count_hosts(by_process(0, 1, 0, 1)) == 1 and count_hosts(by_process(0, 0, 0, 1)) == 1
    assert count_hosts(by_process(0, 1, 2)) == 3
    # one process for each GPU: what JAX calls a slice is the host
    gpus = [Device("gpu", i, host=i // 2) for i in range(4)]
    assert count_hosts(gpus) == 2 and DeviceCaps.detect(jax.devices()).num_hosts == 1


def test_the_link_between_devices_is_found(monkeypatch):
    import jmoe.caps

    gpus = [Device("gpu", ordinal=i) for i in range(2)]
    assert detect_link(gpus[:1]) == "local" and detect_link([Device("cpu"), Device("cpu")]) == "host"
    assert detect_link([Device("gpu", 0), Device("gpu", 1)]) == "network"
    for answer, expected in (((True, True), "nvlink"), ((True, False), "pcie"), ((False, False), "host")):
        monkeypatch.setattr(jmoe.caps, "peer_matrix", lambda _, a=answer: {(0, 1): a, (1, 0): a})
        assert detect_link(gpus) == expected
    monkeypatch.setattr(jmoe.caps, "peer_matrix", lambda _: None)
    assert detect_link(gpus) == "host"
    assert DeviceCaps.detect().link in LINKS


def test_more_gpus_than_the_kernels_serve_move_rows_through_xla_and_say_so():
    many = dataclasses.replace(HOPPER, num_devices=16)
    d = decided("mxfp8", "nvlink_one_sided", caps=many, ranks=16)
    assert d.transport == "xla" and "serve 8 GPUs of a process and there are 16" in d.transport_reason
    assert decided("mxfp8", caps=many, ranks=16).backend == "nvlink_two_sided"
