// The KDA row function (spec/model.md 2, numerics.md rule 6).
//
// A sequence is cut into chunks of 16 tokens at absolute positions. With S the state at the chunk's entry, G_i the
// cumulative log decay inside the chunk (per key channel, this row included), the output of row i is a fixed function
// of S, of the chunk's rows j <= i, and of nothing else:
//   a_ij = sum over d of k_i[d] k_j[d] e^{G_i[d] - G_j[d]}    j < i
//   b_ij = sum over d of q_i[d] k_j[d] e^{G_i[d] - G_j[d]}    j <= i
//   u_i  = beta_i (v_i - [ sum over d of S[d] k_i[d] e^{G_i[d]} + sum over j < i of a_ij u_j ])
//   o_i  = sum over d of S[d] q_i[d] e^{G_i[d]} + sum over j <= i of b_ij u_j
// and when row 15 is done the state is committed:
//   S[d] = e^{G_15[d]} S[d] + sum over j of k_j[d] e^{G_15[d] - G_j[d]} u_j
// Prefill evaluates the function for many rows, decode for one.
//
// Roundings, all float32 (kda_reference.cpp is the definition). G_i = G_{i-1} + g_i, G_0 = g_0. Sums are fma chains
// from 0, d ascending; those over j continue the chain over d, ascending. u_i rounds the difference, then the product.
//   bounded gate (K3, g >= -5 per token, so G >= -80): factored. kd = k_i (e^{G_i} C), qd = q_i (e^{G_i} C),
//     kn = k_j (e^{-G_j} / C), each product rounded once, with C = 2^58 to keep both sides in range (C is constant: an
//     anchor taken from the chunk would let a row see later rows). a_ij = sum kd kn, b_ij = sum qd kn; the sums over S
//     of kd and qd are multiplied by 1/C before the sum over j goes on; the commit's factor is kn (e^{G_15} C).
//   unbounded gate (Kimi Linear): pairwise. a_ij adds (k_i k_j) times exp(G_i - G_j); the commit's factor is
//     k_j exp(G_15 - G_j); C is 1.
//   commit: e^{G_15} S is rounded, then the chain over j is added by fma.
#pragma once

#include <cstddef>
#include <cstdint>

namespace tidelock::numerics {

inline constexpr int kKdaChunk = 16;

struct KdaShape {
  int heads, key_dim, value_dim;  // key_dim and value_dim multiples of 16
  bool bounded;
};

// Floats of one head's state: the entry state S [key_dim, value_dim], the open chunk's keys [key_dim, 16] (kn
// when bounded), corrected values u [16, value_dim], and cumulative gates (bounded: [key_dim], the latest; unbounded:
// [key_dim, 16]). A state of zeros is that of an empty sequence, and the open-chunk parts are zero
// whenever the position is a multiple of 16: equal prefixes have equal bytes.
std::size_t kda_head_state_floats(const KdaShape& shape);

// Rows [position, position + rows) of one sequence, for heads [head_begin, head_end). Heads are independent: threads
// may take ranges of them. A range of several is faster than as many calls of one (their rows share pages). q
// (L2-normalised and scaled), k (L2-normalised): [rows, heads, key_dim]; v: [rows, heads, value_dim]; g (log decay,
// <= 0): [rows, heads, key_dim]; beta: [rows, heads]; state: heads * kda_head_state_floats; out: [rows, heads,
// value_dim]. chunk_states, when not null, receives S at the entry of every chunk that begins in these rows: [chunk
// (counted from absolute position 0), heads, key_dim, value_dim].
void kda_forward(const KdaShape& shape, int head_begin, int head_end, std::int64_t position, std::int64_t rows,
                 const float* q, const float* k, const float* v, const float* g, const float* beta, float* state,
                 float* out, float* chunk_states);

// Exact derivative of the above for a sequence that starts at position 0. All d_* are added to. chunk_states as kept by
// the forward pass. d_out: [rows, heads, value_dim].
void kda_backward(const KdaShape& shape, int head_begin, int head_end, std::int64_t rows, const float* q,
                  const float* k, const float* v, const float* g, const float* beta, const float* chunk_states,
                  const float* d_out, float* d_q, float* d_k, float* d_v, float* d_g, float* d_beta);

namespace reference {  // the definition above as plain loops, one row at a time
void kda_forward(const KdaShape& shape, std::int64_t position, std::int64_t rows, const float* q, const float* k,
                 const float* v, const float* g, const float* beta, float* state, float* out);
}  // namespace reference

}  // namespace tidelock::numerics
