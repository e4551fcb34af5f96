"""`python -m benchmarks vjepa2`: a layer of transformers with every attention."""

from benchmarks.attention_speed import vjepa2_costs


def test_every_attention_is_measured():
    table = vjepa2_costs([256], ["exact", "merged"], repeats=1)
    assert [cost.name for cost in table.costs] == ["own", "exact", "merged"]
    assert all(cost.forward > 0 and cost.both > 0 for cost in table.costs)
    assert "own" in table.text() and "V-JEPA 2-L" in table.text()
