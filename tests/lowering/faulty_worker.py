"""The lowering process of the native route with a fault: the second sigmoid becomes a tanh."""

from __future__ import annotations

import sys

from vllm_neuron.lowering import native_worker

FAULT = ("aten.sigmoid.default", "aten.tanh.default")

if __name__ == "__main__":
    lower = native_worker._lower

    def lower_wrongly(graph, literals):
        places = [index for index, node in enumerate(graph["nodes"]) if node["op"] == FAULT[0]]
        if len(places) > 1:
            graph["nodes"][places[1]]["op"] = FAULT[1]
        return lower(graph, literals)

    native_worker._lower = lower_wrongly
    native_worker.main(int(sys.argv[1]))
