//! The custom calls: what operands they take, and the kernels that compute them.

use crate::attention::{AttentionOperands, AttentionShape, CacheElement, attention};
use crate::kernel::Bf16;
use crate::product::{Instructions, Shape, product_bf16, product_f32};
use crate::xla_ffi::{
    BF16, Buffer, CallFrame, F32, Handler, PRED, S16, S64, XlaError, XlaPool, handle,
};

/// The custom calls by name.
pub const HANDLERS: &[(&str, Handler)] = &[
    ("vllm_neuron.linear", linear),
    ("vllm_neuron.paged_attention", paged_attention),
];

/// The handler of the custom call `vllm_neuron.linear`: operands x (rows, inner) and weight
/// (columns, inner), both float32 or both bfloat16; result (rows, columns) of the same type or,
/// of bfloat16 operands, float32.
///
/// # Safety
///
/// XLA calls it.
unsafe extern "C" fn linear(frame: *mut CallFrame) -> XlaError {
    // SAFETY: XLA's frame.
    unsafe { handle(frame, "vllm_neuron.linear", |frame| multiply(frame)) }
}

unsafe fn multiply(frame: &CallFrame) -> Result<(), String> {
    // SAFETY: XLA's buffers, valid for the call; types are compared before elements are read.
    unsafe {
        let &[x, weight] = frame.operands() else {
            return Err(format!(
                "expected 2 operands, found {}",
                frame.operands().len()
            ));
        };
        let y = frame.result()?;
        let found = (x.sizes()?, weight.sizes()?, y.sizes()?);
        let (&[rows, inner], &[columns, weight_inner], &[y_rows, y_columns]) =
            (&found.0[..], &found.1[..], &found.2[..])
        else {
            return Err(format!("expected matrices, found {found:?}"));
        };
        if (inner, rows, columns) != (weight_inner, y_rows, y_columns) {
            return Err(format!(
                "expected (rows, inner), (columns, inner) and (rows, columns), found {found:?}"
            ));
        }
        let shape = Shape {
            rows,
            inner,
            columns,
        };
        let (pool, with) = (XlaPool(frame), Instructions::best());
        match (x.dtype, weight.dtype, y.dtype) {
            (F32, F32, F32) => product_f32(
                &pool,
                with,
                shape,
                x.elements(),
                weight.elements(),
                y.elements_mut(),
            ),
            (BF16, BF16, F32) => product_bf16::<f32>(
                &pool,
                with,
                shape,
                x.elements(),
                weight.elements(),
                y.elements_mut(),
            ),
            (BF16, BF16, BF16) => product_bf16::<Bf16>(
                &pool,
                with,
                shape,
                x.elements(),
                weight.elements(),
                y.elements_mut(),
            ),
            types => {
                return Err(format!(
                    "expected float32 or bfloat16, found types {types:?}"
                ));
            }
        }
    }
    Ok(())
}

/// The handler of the custom call `vllm_neuron.paged_attention`. Operands, for B sequences of Q
/// queries, N blocks of T keys per sequence, H heads of keys and values shared by G query heads
/// each:
///
/// * queries, float32 (B * H, G * Q, head)
/// * key and value cache, (blocks, T, H, head) and (blocks, T, H, value head), both float32 or both
///   int16, which are the bits of bfloat16
/// * block tables, int64 of B * N elements
/// * what a query sees, bool (B, 1, Q, N * T)
/// * what values are live, bool of B * N * T elements
/// * soft cap of the scores, float32 of one element, 0 for none
/// * if there are sinks: float32 of H * G elements
///
/// Result: (B * H, G * Q, value head), float32 or bfloat16 as the caches are.
///
/// # Safety
///
/// XLA calls it.
unsafe extern "C" fn paged_attention(frame: *mut CallFrame) -> XlaError {
    // SAFETY: XLA's frame.
    unsafe { handle(frame, "vllm_neuron.paged_attention", |frame| attend(frame)) }
}

unsafe fn attend(frame: &CallFrame) -> Result<(), String> {
    // SAFETY: XLA's buffers, valid for the call.
    unsafe {
        let operands = frame.operands();
        let y = frame.result()?;
        let (first, sinks) = match operands {
            [first @ .., sinks] if operands.len() == 8 => (first, Some(*sinks)),
            _ => (operands, None),
        };
        let &[queries, keys, values, blocks, visible, _, _] = first else {
            return Err(format!(
                "expected 7 or 8 operands, found {}",
                operands.len()
            ));
        };
        let types: Vec<_> = operands.iter().map(|operand| operand.dtype).collect();
        let expected = [F32, keys.dtype, keys.dtype, S64, PRED, PRED, F32, F32];
        if types != expected[..operands.len()] {
            return Err(format!("expected types {expected:?}, found {types:?}"));
        }
        let shape = attention_shape([queries, keys, values, blocks, visible])?;
        match (keys.dtype, y.dtype) {
            (F32, F32) => run::<f32>(frame, shape, first, sinks, y),
            (S16, BF16) => run::<Bf16>(frame, shape, first, sinks, y),
            types => Err(format!(
                "expected caches and result float32, or int16 and bfloat16, found types {types:?}"
            )),
        }
    }
}

unsafe fn attention_shape(operands: [&Buffer; 5]) -> Result<AttentionShape, String> {
    let mut found = Vec::new();
    for operand in operands {
        // SAFETY: the caller's.
        found.push(unsafe { operand.sizes() }?);
    }
    let refuse = || format!("sizes {found:?} are not those of attention over a paged cache");
    let (
        &[pairs, rows, head],
        &[cache_blocks, block_size, kv_heads, key_head],
        &[value_blocks, value_block_size, value_heads, value_head],
        &[sequences, 1, queries, keys],
    ) = (&found[0][..], &found[1][..], &found[2][..], &found[4][..])
    else {
        return Err(refuse());
    };
    let blocks = found[3].iter().product::<usize>().checked_div(sequences);
    let group = rows.checked_div(queries);
    let (Some(blocks), Some(group)) = (blocks, group) else {
        return Err(refuse());
    };
    let agree = head == key_head
        && (cache_blocks, block_size, kv_heads) == (value_blocks, value_block_size, value_heads)
        && (pairs, rows, keys) == (sequences * kv_heads, group * queries, blocks * block_size);
    if !agree || (cache_blocks == 0 && blocks > 0) {
        return Err(refuse());
    }
    Ok(AttentionShape {
        sequences,
        queries,
        kv_heads,
        group,
        head,
        value_head,
        blocks,
        block_size,
        cache_blocks,
    })
}

unsafe fn run<W: CacheElement>(
    frame: &CallFrame,
    shape: AttentionShape,
    operands: &[&Buffer],
    sinks: Option<&Buffer>,
    y: &Buffer,
) -> Result<(), String> {
    let &[queries, keys, values, blocks, visible, live, soft_cap] = operands else {
        return Err(format!("expected 7 operands, found {}", operands.len()));
    };
    // SAFETY: the caller compared the types; a bool is a byte.
    let (operands, y) = unsafe {
        let cap: &[f32] = soft_cap.elements();
        let operands = AttentionOperands {
            queries: queries.elements(),
            keys: keys.elements::<W>(),
            values: values.elements::<W>(),
            blocks: blocks.elements(),
            visible: visible.elements(),
            live: live.elements(),
            sinks: sinks.map(|sinks| sinks.elements()),
            soft_cap: cap.first().copied().filter(|&cap| cap != 0.0),
        };
        (operands, y.elements_mut())
    };
    attention(&XlaPool(frame), Instructions::best(), shape, operands, y);
    Ok(())
}
