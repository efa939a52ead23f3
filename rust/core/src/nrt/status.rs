//! `NRT_STATUS`: a number that keeps values which this table does not know.

use std::fmt;

/// What a call of the runtime returns. Not an enum: an unknown value must survive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(transparent)]
pub struct Status(pub i32);

/// Value, name and meaning (`nrt/nrt_status.h`; 8 and 12 are unused).
const TABLE: [(i32, &str, &str); 28] = [
    (0, "NRT_SUCCESS", "success"),
    (1, "NRT_FAILURE", "non-specific failure"),
    (2, "NRT_INVALID", "invalid NEFF, tensor name or tensor size"),
    (3, "NRT_INVALID_HANDLE", "invalid handle"),
    (
        4,
        "NRT_RESOURCE",
        "a resource, as a rule device memory, could not be allocated",
    ),
    (5, "NRT_TIMEOUT", "the operation timed out"),
    (6, "NRT_HW_ERROR", "hardware failure"),
    (7, "NRT_QUEUE_FULL", "too many pending executions"),
    (9, "NRT_LOAD_NOT_ENOUGH_NC", "not enough NeuronCores"),
    (
        10,
        "NRT_UNSUPPORTED_NEFF_VERSION",
        "version or feature of the NEFF not supported",
    ),
    (
        11,
        "NRT_FAIL_HOST_MEM_ALLOC",
        "host memory could not be allocated",
    ),
    (13, "NRT_UNINITIALIZED", "called before nrt_init"),
    (14, "NRT_CLOSED", "called after nrt_close"),
    (15, "NRT_QUEUE_EMPTY", "queue without data"),
    (
        101,
        "NRT_EXEC_UNIT_UNRECOVERABLE",
        "the execution unit needs a reset",
    ),
    (1002, "NRT_EXEC_BAD_INPUT", "invalid input to execute"),
    (
        1003,
        "NRT_EXEC_COMPLETED_WITH_NUM_ERR",
        "completed, and produced NaN",
    ),
    (
        1004,
        "NRT_EXEC_COMPLETED_WITH_ERR",
        "completed with other errors",
    ),
    (
        1005,
        "NRT_EXEC_NC_BUSY",
        "the core is locked by another model or process",
    ),
    (
        1006,
        "NRT_EXEC_OOB",
        "indirect copy or embedding update out of bounds",
    ),
    (1100, "NRT_COLL_PENDING", "collective still pending"),
    (1200, "NRT_EXEC_HW_ERR_COLLECTIVES", "stuck in a collective"),
    (1201, "NRT_EXEC_HW_ERR_HBM_UE", "unrepairable HBM error"),
    (1202, "NRT_EXEC_HW_ERR_NC_UE", "on-chip parity error"),
    (1203, "NRT_EXEC_HW_ERR_DMA_ABORT", "DMA engine error"),
    (
        1204,
        "NRT_EXEC_SW_NQ_OVERFLOW",
        "notification queue overflow",
    ),
    (
        1205,
        "NRT_EXEC_HW_ERR_REPAIRABLE_HBM_UE",
        "repairable HBM error",
    ),
    (1206, "NRT_NETWORK_PROXY_FAILURE", "EFA proxy failure"),
];

impl Status {
    /// Success.
    pub const SUCCESS: Self = Self(0);

    /// The name in the header, or `None` for a value that is not in the table.
    pub fn name(self) -> Option<&'static str> {
        self.row().map(|(_, name, _)| *name)
    }

    /// What it means, or `None` for a value that is not in the table.
    pub fn meaning(self) -> Option<&'static str> {
        self.row().map(|(_, _, meaning)| *meaning)
    }

    /// Every value of the table.
    pub fn known() -> impl Iterator<Item = Self> {
        TABLE.iter().map(|(value, _, _)| Self(*value))
    }

    fn row(self) -> Option<&'static (i32, &'static str, &'static str)> {
        TABLE.iter().find(|(value, _, _)| *value == self.0)
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.row() {
            Some((value, name, meaning)) => write!(f, "{name} ({value}): {meaning}"),
            None => write!(f, "status {} (unknown to this version)", self.0),
        }
    }
}
