/* The transfer engine's one translation unit: every part of it, each after those that it needs.
 *
 * All functions but those of shim.h are static, so that the compiler may inline across parts; no part declares what a
 * later one defines. The parts are no units of their own: only this file is compiled.
 */
#define _GNU_SOURCE
#include "page_pack.h" /* of the CPU kernels */
#include "state/state.h"

#include "state/state.c"
#include "thread/queue.c"

#include "link/addresses.c"
#include "memory/grants.c"

#include "copy/digest.c"
#include "copy/packing.c"

#include "device/cuda_driver.c"
#include "device/cuda_kernels.c"
#include "device/cuda.c"

#include "device/emulated_work.c"
#include "device/emulated.c"

#include "wire/message.c"
#include "write/piece.c"
#include "memory/own_pages.c"
#include "copy/landing.c"
#include "copy/device_link.c"
#include "copy/device_pages.c"
#include "copy/device_images.c"
#include "copy/device_done.c"
#include "copy/host_pages.c"
#include "write/turns.c"
#include "write/write.c"

#include "link/path.c"
#include "link/link.c"
#include "wire/receive.c"

#include "thread/progress.c"
#include "thread/engine.c"
#include "thread/shortcut.c"

#include "face/submit.c"
#include "face/own_pages_calls.c"
#include "face/calls.c"
