"""What ``hotrec calibrate`` times: the functions that training calls, on rows like training's."""

from hotrec.calibrate.kernels import Probe
from hotrec.calibrate.probes.hot import hot_probes
from hotrec.calibrate.probes.layers import layer_probes
from hotrec.calibrate.probes.rows import replicated_probes, row_probes
from hotrec.calibrate.workload import CalibrationTarget, CalibrationWorkload, group_alone

__all__ = ["CalibrationWorkload", "Probe", "CalibrationTarget", "all_probes", "group_alone"]


def all_probes(bench: CalibrationWorkload) -> list[Probe]:
    """Every kernel of ``hotrec.cost_model.KERNELS`` that the device has."""
    return [
        *layer_probes(bench),
        *hot_probes(bench),
        *replicated_probes(bench),
        *row_probes(bench),
    ]
