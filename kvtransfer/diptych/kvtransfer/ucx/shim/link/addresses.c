/* The addresses of this host: by them its connections are known elsewhere. */
#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>
#include <stdio.h>

/* The address in words, or NULL where it is none of IP. */
static const char *address_words(const struct sockaddr *address, char *words, socklen_t size)
{
    if (address == NULL)
        return NULL;
    if (address->sa_family == AF_INET)
        return inet_ntop(AF_INET, &((const struct sockaddr_in *)address)->sin_addr, words, size);
    if (address->sa_family == AF_INET6)
        return inet_ntop(AF_INET6, &((const struct sockaddr_in6 *)address)->sin6_addr, words, size);
    return NULL;
}

/* Write one a line, as many as there is room for. */
static void list_own_addresses(char *out, size_t size)
{
    char words[INET6_ADDRSTRLEN];
    struct ifaddrs *all;
    out[0] = '\0';
    if (getifaddrs(&all) != 0)
        return;
    for (struct ifaddrs *each = all; each != NULL; each = each->ifa_next) {
        const char *found = address_words(each->ifa_addr, words, sizeof words);
        int used = found ? snprintf(out, size, "%s\n", found) : 0;
        if ((size_t)used >= size) {
            out[0] = '\0';
            break;
        }
        out += used;
        size -= (size_t)used;
    }
    freeifaddrs(all);
}
