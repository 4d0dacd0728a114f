"""Config × sites → QuantizationPlan: every decision about a conversion, as one value that prints."""

from graphquant.plan.plan import PlannedSite, QuantizationPlan, check_config, make_plan

__all__ = ["PlannedSite", "QuantizationPlan", "check_config", "make_plan"]
