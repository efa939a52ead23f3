"""`vllm-neuron compare`: where two routes differ from eager, by bucket, layer and operator.

The guide, which defines what is measured and the JSON report, is docs/how-to-compare-routes.md.
"""
