/* The header of every active message, and what makes one authentic.
 *
 * Each engine has a random key, that only its metadata tells: whoever may read the membership can send messages here. UCX
 * delivers messages of anybody who knows our address, so the key is looked at before anything else of a message.
 */
#ifndef KVT_HEADER_H
#define KVT_HEADER_H

#include <stdint.h>

#include "../shim.h"

#define HEADER_VERSION 0x4b565403u
typedef enum { MESSAGE_HELLO = 1, MESSAGE_BYE = 2, MESSAGE_NOTE = 3, MESSAGE_PAGES = 4 } message_kind;
typedef struct {
    uint32_t version;
    uint32_t kind;
    uint8_t key[KVT_KEY_BYTES]; /* the receiver's */
    uint64_t sender; /* instances */
    uint64_t target;
    uint64_t session; /* the sender's */
    uint64_t echo;    /* the target's session as far as the sender knows it, else 0 */
    uint64_t received; /* how many numbered messages of the target's session the sender has dealt with */
    uint64_t number;   /* of a note or page message, from 0 in each session */
    union {
        struct {
            uint64_t num_runs;
        } pages;
        struct {
            uint64_t has_digest, digest;
        } note;
        struct {
            double sent_s, echo_s, held_s; /* the sender's clock; the target's as last heard; for how long since */
        } hello;
    };
} message_header;

#endif
