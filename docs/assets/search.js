// A word that begins with "-" excludes pages in the search engine's language. Readers of these pages look for options: `--seq-len`.
const post = Worker.prototype.postMessage;
Worker.prototype.postMessage = function (message, ...rest) {
  const query = message && message.type === 2 && typeof message.data === "string"; // 2: a query, in Material's messages to its worker
  return post.call(this, query ? { ...message, data: message.data.replace(/(^|\s)-+(?=\S)/g, "$1") } : message, ...rest);
};
