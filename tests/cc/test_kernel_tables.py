"""The tables of the CUDA kernels as tests read them, without CUDA."""

from __future__ import annotations

import kernel_tables
import pytest

TABLE = """
// op(s), operand type(s), variant, file, the family's own
KERNEL(FPROP_DGRAD, BF16_F16, 256x64x64_swap_ab, swap_ab_sm90, 256, 64, {1, 2})  // KERNEL(X)
KERNEL(WGRAD, F32,
       128x64x32_mma, wgrad_mma_sm90, Tile(128, 64))
PADDED(DGRAD, BF16, 256x64x64_swap_ab)
FUSED(FPROP, F16, 256x64x64_swap_ab)
"""


def test_a_call_stands_for_every_pair_of_operation_and_type():
    names = [instance.name for instance in kernel_tables.parse("igemm_wgmma", TABLE)]
    assert names == [
        "fprop_igemm_wgmma_bf16_256x64x64_swap_ab",
        "fprop_igemm_wgmma_f16_256x64x64_swap_ab",
        "dgrad_igemm_wgmma_bf16_256x64x64_swap_ab",
        "dgrad_igemm_wgmma_f16_256x64x64_swap_ab",
        "wgrad_igemm_wgmma_f32_128x64x32_mma",
        "dgrad_igemm_wgmma_bf16_256x64x64_swap_ab_padded",
        "fprop_igemm_wgmma_f16_256x64x64_swap_ab_fused",
    ]


def test_padded_and_fused_instances_have_the_source_of_the_plain_one():
    found = kernel_tables.parse("igemm_wgmma", TABLE)
    assert [(i.source, i.padded, i.fused) for i in (found[0], *found[4:])] == [
        ("swap_ab_sm90", False, False),
        ("wgrad_mma_sm90", False, False),
        ("swap_ab_sm90", True, False),
        ("swap_ab_sm90", False, True),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("KERNEL(FPROP, F64, 1x1, a)", "cannot read"),
        ("KERNEL(FORWARD, F32, 1x1, a)", "cannot read"),
        ("KERNEL(FPROP, F32, 1 x 1, a)", "cannot read"),
        ("KERNEL(FPROP, F32, 1x1, a) KERNEL(FPROP, BF16_F32, 1x1, a)", "twice"),
        ("PADDED(FPROP, F32, 1x1)", "PADDED without KERNEL"),
        ("FUSED(FPROP, F32, 1x1)", "FUSED without KERNEL"),
        ("KERNELS(FPROP, F32, 1x1, a)", "neither KERNEL, PADDED nor FUSED"),
    ],
)
def test_what_is_no_table_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        kernel_tables.parse("a", text)


def test_the_tables_are_there_and_name_every_instance_once():
    found = kernel_tables.all_instances()
    assert {instance.op for instance in found} == {"fprop", "dgrad", "wgrad"}
    assert {instance.dtype for instance in found} >= {"f32", "bf16", "f16"}
    assert len({instance.name for instance in found}) == len(found)
    sources = {(instance.family, instance.source) for instance in found}
    missing = [s for s in sources if not list((kernel_tables.TABLES / s[0]).glob(f"{s[1]}.cu*"))]
    assert not missing, f"no such device kernels: {missing}"
