"""Reports of plans that were really made: what is written down is enough to walk both steps again."""

import pytest
import torch
from torch import nn

import memfit
from memfit.plan.plan import Plan, Treatment
from memfit.report import plan_page
from memfit.report.shades import Shade
from memfit.report.story import stories_of


def make_model():
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 64)) for _ in range(4)]
    return nn.Sequential(*layers)


class WithLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = make_model(), nn.Linear(64, 500)

    def forward(self, x, target):
        return nn.functional.cross_entropy(self.head(self.body(x)), target)


@pytest.mark.parametrize(
    ("model", "sample", "options"),
    [
        (make_model, (512,), {}),
        (WithLoss, (512, "target"), {"allow": ("recompute", "lean", "chunk")}),
        (make_model, (1024,), {"allow": ("offload",), "budget": 0.9}),
    ],
    ids=["recompute", "rewritten", "sent-out"],
)
def test_the_file_of_a_plan_tells_its_story(model, sample, options, tmp_path, monkeypatch):
    monkeypatch.setenv("MEMFIT_CACHE_DIR", str(tmp_path))
    batch = (torch.randn(sample[0], 64), *(torch.randint(0, 500, (sample[0],)) for _ in sample[1:]))
    made = memfit.plan(model(), batch, **{"budget": 0.75, "optimizer": "sgd", "time_limit": 1.0} | options)
    made.save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert plan == made
    [story] = stories_of(plan)
    assert max(story.planned.totals(story.values)) == plan.peak_bytes
    assert max(story.unplanned.totals(story.values)) == plan.unplanned_peak_bytes
    treatments = {fate.treatment for fate in plan.fates}
    if Treatment.AGAIN in treatments:
        assert max(story.planned.stacked(story.values)[Shade.AGAIN]) > 0
    if options.get("allow") == ("offload",):
        assert Treatment.MOVED in treatments
        assert "sent out" in plan_page.render(plan)
    planned_us = sum(moment.time_us for moment in story.planned.moments)
    assert planned_us == pytest.approx(plan.step_us + plan.extra_us, rel=0.02)
