"""Trace + Costs + Plan -> Forecast: the residency machine on a virtual clock."""
