// The C interface of the decoder: what kernels/abi.py calls.
#include <sys/mman.h>

#include "chain.h"
#include "choosing.h"
#include "decoder.h"
#include "lanes.h"
#include "standing.h"

#define TAILDRAFT_API extern "C" __attribute__((visibility("default")))

TAILDRAFT_API const char* taildraft_isa() {
#if defined(TAILDRAFT_GENERIC)
  return "generic";
#elif defined(__AVX512F__) && !defined(TAILDRAFT_AVX2)
  return "avx512";
#elif defined(__AVX2__) && defined(__FMA__)
  return "avx2";
#else
  return "generic";
#endif
}

// Null when threads or memory are refused.
TAILDRAFT_API void* taildraft_team_new(int threads) {
  try {
    return new team::Team(threads);
  } catch (const std::exception&) {
    return nullptr;
  }
}

TAILDRAFT_API void taildraft_team_free(void* team) { delete static_cast<team::Team*>(team); }

TAILDRAFT_API void* taildraft_decoder_new(const forward::Model* model, void* team) {
  try {
    return new forward::Decoder(*model, static_cast<team::Team*>(team));
  } catch (const std::exception&) {
    return nullptr;
  }
}

TAILDRAFT_API void taildraft_decoder_free(void* decoder) { delete static_cast<forward::Decoder*>(decoder); }

TAILDRAFT_API int taildraft_forward(void* decoder, const forward::Call* call) {
  try {
    return static_cast<forward::Decoder*>(decoder)->run(*call);
  } catch (const std::bad_alloc&) {
    return forward::kNoMemory;
  }
}

// From where each row stands, `depth` loops along with the state of its `number`, to the end of the call's loops.
TAILDRAFT_API int taildraft_forward_from(void* decoder, const forward::Call* call, const int32_t* depth,
                                         const int32_t* number, const float* states) {
  try {
    forward::Decoder& own = *static_cast<forward::Decoder*>(decoder);
    standing::gather(*call, depth, number, states, own.width());
    return standing::run(own, *call, depth);
  } catch (const std::bad_alloc&) {
    return forward::kNoMemory;
  }
}

TAILDRAFT_API int taildraft_forward_choosing(void* decoder, choosing::Call* call) {
  try {
    return choosing::run(*static_cast<forward::Decoder*>(decoder), *call);
  } catch (const std::bad_alloc&) {
    return forward::kNoMemory;
  }
}

TAILDRAFT_API int taildraft_chain(void* decoder, chain::Call* call) {
  try {
    return chain::run(*static_cast<forward::Decoder*>(decoder), *call);
  } catch (const std::bad_alloc&) {
    return forward::kNoMemory;
  }
}

TAILDRAFT_API int taildraft_lanes(void* decoder, lanes::Call* call) {
  try {
    return lanes::run(*static_cast<forward::Decoder*>(decoder), *call);
  } catch (const std::bad_alloc&) {
    return forward::kNoMemory;
  }
}

// Packs rows (n, k): its panel p becomes panel first + p * every of `out`.
TAILDRAFT_API int taildraft_pack(void* team, const uint16_t* rows, int n, int k, uint16_t* out, int first,
                                 int every) {
  team::Team* members = static_cast<team::Team*>(team);
  if (!members->usable()) return forward::kForked;
  auto job = [&](const team::Member& me) {
    const team::Range mine = me.share(panels::count(n));
    for (int p = mine.begin; p < mine.end; ++p)
      panels::pack_panel(rows, n, k, p, out + panels::offset(first + p * every, 0, k));
  };
  members->run(job);
  return forward::kOk;
}

// Asks for huge pages under memory not touched yet: a forward walks all of it, page by page. A refusal is fine.
TAILDRAFT_API void taildraft_advise(void* data, size_t bytes) {
#if defined(MADV_HUGEPAGE)
  const uintptr_t page = 4096, begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page;
  const uintptr_t end = (reinterpret_cast<uintptr_t>(data) + bytes) / page * page;
  if (end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#endif
}
