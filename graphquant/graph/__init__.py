"""Reading fx graphs: the attention finder. Nothing here knows of quantization."""

from graphquant.graph.finder import find_attention
from graphquant.graph.sites import AttentionLayer, AttentionSites, NearMiss, Site

__all__ = ["AttentionLayer", "AttentionSites", "NearMiss", "Site", "find_attention"]
